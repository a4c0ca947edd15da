"""The pages on moving from other tiering: every option of kvtier's that they name is one, and tables are whole."""

import ast
import json
import re
from pathlib import Path

import msgspec
import pytest

from kvtier.backend.contract import backend_class, known_types
from kvtier.config import EngineConfig, EngineLimits, TierConfig, TierLimits, tier_options
from kvtier.settings.hints import Hint

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs" / "how-to").glob("move-from-*.md"))
OPTIONS_IN_VLLM = ROOT / "kvtier" / "integrations" / "vllm_options.py"
OF_REQUESTS = {"kv_load_tiers"}  # In vLLM's `kv_transfer_params`.

every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)


def options_in_vllm():
    """Return the fields of the options inside vLLM, without vLLM."""
    structs = [node for node in ast.parse(OPTIONS_IN_VLLM.read_text()).body if isinstance(node, ast.ClassDef)]
    return {
        line.target.id
        for struct in structs
        for line in struct.body
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
    }


def options():
    structs = [EngineConfig, EngineLimits, TierConfig, TierLimits, Hint]
    structs += [backend_class(name).options_type for name in known_types()]
    ours = {field.encode_name for struct in structs for field in msgspec.structs.fields(struct)}
    return ours | options_in_vllm() | OF_REQUESTS


def tables(page):
    found = re.findall(r"^\| \w+'s .*\|\n\|[-|]+\|\n((?:\|.*\n)+)", page.read_text(), re.MULTILINE)
    return [[[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()] for table in found]


def names(cell):
    return set(re.findall(r"`([a-z_0-9]+)`", cell))


@every_page
def test_every_option_of_kvtiers_that_a_table_names_exists(page):
    rows = [row for table in tables(page) for row in table if len(row) == 3]
    assert len(rows) > 15
    known = options()
    assert {name for _, ours, _ in rows for name in names(ours)} - known == set()
    assert all(names(ours) or ours.startswith("none") or "options of the tier" in ours for _, ours, _ in rows)
    assert all(theirs.startswith("`") or theirs == "none" for theirs, _, _ in rows)


@every_page
def test_no_option_of_theirs_stands_in_two_rows_of_a_table(page):
    for table in tables(page):
        theirs = [name for row in table for name in re.findall(r"`([^`]+)`", row[0])]
        assert len(theirs) == len(set(theirs))


@every_page
def test_the_tiers_of_a_pages_configurations_are_accepted(page):
    blocks = re.findall(r"```json\n(.*?)```", page.read_text(), re.DOTALL)
    ours = [block for block in map(json.loads, blocks) if block["kv_connector"] == "KVTierConnector"]
    assert ours
    known = options_in_vllm()
    for extra in (block["kv_connector_extra_config"] for block in ours):
        assert extra.keys() <= known
        config = {"cpu_bytes_to_use": "1GiB", "chunk_bytes": "1MiB", "secondary_tiers": extra["secondary_tiers"]}
        for index, tier in enumerate(EngineConfig.from_dict(config).secondary_tiers):
            tier_options(tier, f"secondary_tiers[{index}]")
