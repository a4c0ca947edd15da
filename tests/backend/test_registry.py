import itertools

import msgspec
import pytest

from kvtier.backend.contract import backend_class, known_types
from kvtier.config import EngineConfig, settled
from kvtier.errors import ConfigError
from kvtier_backends.dummy import DummyBackend


class Own(DummyBackend):
    """A whole backend."""


class Shelf:
    Inner = Own
    number = 3
    Forgetful = type("Forgetful", (Own,), {"durability": "host"})
    Optionless = type("Optionless", (Own,), {"options_type": dict})
    Lax = type("Lax", (Own,), {"options_type": msgspec.defstruct("LaxOptions", [])})
    Nowhere = type("Nowhere", (Own,), {"locality": "remote"})
    Anywhere = type("Anywhere", (Own,), {"runner": "thread"})


HERE = __name__
numbers = itertools.count()


@pytest.fixture
def module(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)

    def install(source):
        name = f"kvtier_test_module_{next(numbers)}"
        (tmp_path / f"{name}.py").write_text(source)
        return name

    return install


def refused(type_name):
    with pytest.raises(ConfigError) as caught:
        backend_class(type_name)
    return str(caught.value)


def test_a_class_is_found_by_its_module_and_name():
    assert backend_class(f"{HERE}:Own") is Own
    assert backend_class(f"{HERE}:Shelf.Inner") is Own


@pytest.mark.parametrize("value", [f"{HERE}:Own", f"{HERE} : Own", f"{HERE}:Own [extra]"])
def test_a_distributions_type_is_found_by_its_entry_point(distribution, value):
    distribution("kvtier-null", {"null": value})
    distribution("kvtier-same", {"null": f"{HERE}:Own"})  # Two that mean the same class are one.
    assert backend_class("null") is Own
    assert {"null", "fs", "dummy", "mooncake", "object", "redis"} <= set(known_types())
    assert list(known_types()) == sorted(known_types())


@pytest.mark.parametrize("value", ["kvtier", "a b:", "!", "[extra]"])
def test_an_entry_point_that_names_no_class_is_refused(distribution, value):
    distribution("kvtier-null", {"null": value})
    assert refused("null") == "tier type 'null' is not of the form \"module:Class\""


def test_a_distribution_cannot_replace_a_built_in_type(distribution):
    distribution("kvtier-null", {"dummy": f"{HERE}:Own"})
    assert backend_class("dummy") is not Own
    assert known_types().count("dummy") == 1


def test_a_type_that_two_distributions_claim_is_refused_naming_both(distribution):
    distribution("kvtier-one", {"null": f"{HERE}:Own"})
    distribution("kvtier-two", {"null": f"{HERE}:Shelf.Inner"})
    message = refused("null")
    assert f"{HERE}:Own (kvtier-one)" in message
    assert f"{HERE}:Shelf.Inner (kvtier-two)" in message


def test_an_unknown_type_is_refused_with_the_closest_one_and_all_that_are_known(distribution):
    distribution("kvtier-null", {"null": f"{HERE}:Own"})
    message = refused("dumy")
    assert message.startswith("'dumy' is no tier type; did you mean 'dummy'? Known: ")
    assert all(name in message for name in ["dummy", "fs", "null", '"module:Class"'])


MALFORMED = [":", "a:", ":B", "a:b:c", "a..b:C", ".a:B", "a:B-C", "a b:C", "a:B.", "1a:B"]


@pytest.mark.parametrize(
    ("type_name", "message"),
    [
        *((name, "{name!r} is no tier type") for name in ("", " ", "FS", "fs ", "../fs", "zzz")),
        *((name, 'tier type {name!r} is not of the form "module:Class"') for name in MALFORMED),
    ],
)
def test_a_name_that_is_almost_a_type_is_refused(type_name, message):
    assert refused(type_name).startswith(message.format(name=type_name))


def test_a_module_that_is_not_there_is_named():
    assert refused("kvtier_nowhere.deep:Tier").endswith("there is no module 'kvtier_nowhere' to import")
    assert refused("kvtier.nowhere:Tier").endswith("there is no module 'kvtier.nowhere' to import")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import kvtier_no_such.deep\n", "needs the module 'kvtier_no_such', which is not installed"),
        ("raise ImportError('libfabric.so.1: cannot open')\n", "cannot be imported: libfabric.so.1: cannot open"),
    ],
)
def test_a_dependency_that_cannot_be_imported_is_named_and_the_cause_is_kept(module, source, message):
    with pytest.raises(ConfigError, match=message) as caught:
        backend_class(f"{module(source)}:Tier")
    assert isinstance(caught.value.__cause__, ImportError)


@pytest.mark.parametrize(
    ("source", "kind"),
    [
        ("def f(:\n", SyntaxError),
        ("import os; os.nothing\n", AttributeError),
        ("import importlib; importlib.import_module(__name__ + '.missing')\n", ModuleNotFoundError),
    ],
)
def test_a_bug_in_a_module_comes_out_as_it_is(module, source, kind):
    with pytest.raises(kind):
        backend_class(f"{module(source)}:Tier")


NOT_WHOLE = [
    ("Nothing", f"module {HERE!r} has no 'Nothing'"),
    ("Shelf.Nothing", f"module {HERE!r} has no 'Shelf.Nothing'"),
    ("Shelf", "is no subclass of kvtier.backend.Backend"),
    ("Shelf.number", "3 is no subclass of kvtier.backend.Backend"),
    ("Shelf.Forgetful", "Forgetful.durability is no Durability"),
    ("Shelf.Optionless", "Optionless.options_type is no msgspec.Struct"),
    ("Shelf.Lax", "Lax.options_type is not both frozen and closed to unknown fields"),
    ("Shelf.Anywhere", "Anywhere.runner is 'thread'; 'process' or None accepted"),
    ("Shelf.Nowhere", "Nowhere.locality is 'remote'; 'LOCAL', 'REMOTE' or None accepted"),
]


@pytest.mark.parametrize(("name", "message"), NOT_WHOLE)
def test_an_incomplete_backend_is_refused_with_what_it_lacks(name, message):
    assert refused(f"{HERE}:{name}").endswith(message)
    assert refused("kvtier.backend:Backend").endswith("does not implement aclose, delete, load, open, probe, store")


def test_a_tier_of_a_service_is_remote_unless_its_configuration_says_otherwise():
    tiers = [{"type": "redis"}, {"type": "object", "url": "s3://bucket", "locality": "LOCAL"}, {"type": "dummy"}]
    config = EngineConfig.from_dict({"cpu_bytes_to_use": "1MiB", "chunk_bytes": 4_096, "secondary_tiers": tiers})
    assert [tier.locality for tier in settled(config).secondary_tiers] == ["REMOTE", "LOCAL", None]
