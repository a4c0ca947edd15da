"""The face of the contract: an author imports from `kvtier.backend`, and from nowhere else in kvtier."""

import ast
from pathlib import Path
from typing import Protocol

import msgspec
import pytest

import kvtier.backend
from kvtier import errors
from kvtier.backend import OPTIONAL, ConfigError, Duration, Options, contract

EXAMPLE = Path(__file__).parents[2] / "examples" / "write_a_backend.py"


def test_the_example_backend_imports_nothing_else_of_kvtier():
    nodes = ast.walk(ast.parse(EXAMPLE.read_text()))
    imported = {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    assert {name for name in imported if name.startswith("kvtier")} == {"kvtier.backend"}


def test_every_public_name_of_the_contract_is_there():
    public = {
        name
        for name, thing in vars(contract).items()
        if not name.startswith("_") and getattr(thing, "__module__", "") == contract.__name__ and name != "OptionsT"
    }
    assert public <= vars(kvtier.backend).keys()


def test_every_error_that_a_tier_may_raise_or_answer_is_there():
    raised = (errors.BackendError, errors.ChunkError, ConfigError)
    of_tiers = {name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, raised)}
    assert of_tiers <= vars(kvtier.backend).keys()


def test_optional_lists_every_optional_protocol():
    protocols = {kind for kind in vars(contract).values() if isinstance(kind, type) and Protocol in kind.__bases__}
    assert set(OPTIONAL) == protocols


class LampOptions(Options, frozen=True, kw_only=True):
    burns_s: Duration = 1.0


def test_options_are_frozen_and_closed_and_checked():
    assert LampOptions(burns_s="2min").burns_s == 120
    assert LampOptions.__struct_config__.frozen
    assert LampOptions.__struct_config__.forbid_unknown_fields
    with pytest.raises(ConfigError, match=r"^burns_s: "):
        LampOptions(burns_s=-1)
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"burn_s": 1}, LampOptions)
