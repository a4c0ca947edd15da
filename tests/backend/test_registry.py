import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

import msgspec
import pytest

from kvtier.backend.contract import (
    Abandoned,
    Backend,
    Durability,
    Outcome,
    Read,
    TierContext,
    Write,
    backend_class,
    known_types,
)
from kvtier.backend.namespace import OffloadKey
from kvtier.config import EngineConfig, settled
from kvtier.errors import ConfigError
from kvtier.settings import Checked


class NullOptions(Checked, frozen=True, forbid_unknown_fields=True, kw_only=True):
    pass


class NullBackend(Backend[NullOptions]):
    """A whole backend that keeps nothing."""

    durability = Durability.PROCESS
    options_type = NullOptions

    @classmethod
    async def open(cls, options: NullOptions, context: TierContext) -> Self:
        return cls()

    async def probe(self, keys: Sequence[OffloadKey]) -> Sequence[bool]:
        return [False for _ in keys]

    async def load(self, reads: Sequence[Read]) -> Sequence[Outcome]:
        raise NotImplementedError

    async def store(self, writes: Sequence[Write]) -> Sequence[Outcome]:
        raise NotImplementedError

    async def delete(self, keys: Sequence[OffloadKey]) -> None:
        pass

    async def aclose(self, deadline_s: float) -> Abandoned:
        return Abandoned(transfers=0)


class Unfinished(NullBackend):
    async def probe(self, keys: Sequence[OffloadKey]) -> Sequence[bool]:
        raise NotImplementedError

    probe.__isabstractmethod__ = True  # type: ignore[attr-defined]


class Shelf:
    """Classes that lack one thing each."""

    Inner = NullBackend
    number = 3
    Forgetful = type("Forgetful", (NullBackend,), {"durability": "host"})
    Optionless = type("Optionless", (NullBackend,), {"options_type": dict})
    Lax = type("Lax", (NullBackend,), {"options_type": msgspec.defstruct("LaxOptions", [])})
    Nowhere = type("Nowhere", (NullBackend,), {"locality": "remote"})
    Anywhere = type("Anywhere", (NullBackend,), {"runner": "thread"})


HERE = __name__
Install = Callable[..., str]
numbers = itertools.count()


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Make an importable module of some source text; answers its name, which no other test has used."""
    monkeypatch.syspath_prepend(tmp_path)

    def install(source: str) -> str:
        name = f"kvtier_test_module_{next(numbers)}"
        (tmp_path / f"{name}.py").write_text(source)
        return name

    return install


@pytest.fixture
def distribution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Install a distribution with entry points of ours."""
    monkeypatch.syspath_prepend(tmp_path)

    def install(name: str, points: dict[str, str]) -> str:
        folder = tmp_path / f"{name.replace('-', '_')}-1.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        lines = "\n".join(f"{point} = {value}" for point, value in points.items())
        (folder / "entry_points.txt").write_text(f"[kvtier.backends]\n{lines}\n")
        return name

    return install


def refused(type_name: str) -> str:
    with pytest.raises(ConfigError) as caught:
        backend_class(type_name)
    return str(caught.value)


@pytest.mark.parametrize("type_name", ["dummy", "fs", "redis"])
def test_a_built_in_type_is_known_and_whole(type_name: str) -> None:
    assert type_name in known_types()
    assert issubclass(backend_class(type_name), Backend)


def test_a_class_is_found_by_its_module_and_name() -> None:
    assert backend_class(f"{HERE}:NullBackend") is NullBackend
    assert backend_class(f"{HERE}:Shelf.Inner") is NullBackend


@pytest.mark.parametrize("value", [f"{HERE}:NullBackend", f"{HERE} : NullBackend", f"{HERE}:NullBackend [extra]"])
def test_a_distributions_type_is_found_by_its_entry_point(distribution: Install, value: str) -> None:
    distribution("kvtier-null", {"null": value})
    distribution("kvtier-same", {"null": f"{HERE}:NullBackend"})  # Two that mean the same class are one.
    assert backend_class("null") is NullBackend
    assert {"null", "fs", "dummy", "mooncake", "redis"} <= set(known_types())
    assert list(known_types()) == sorted(known_types())


@pytest.mark.parametrize("value", ["kvtier", "a b:", "!", "[extra]"])
def test_an_entry_point_that_names_no_class_is_refused(distribution: Install, value: str) -> None:
    distribution("kvtier-null", {"null": value})
    assert refused("null") == "tier type 'null' is not of the form \"module:Class\""


def test_a_distribution_cannot_replace_a_built_in_type(distribution: Install) -> None:
    distribution("kvtier-null", {"dummy": f"{HERE}:NullBackend"})
    assert backend_class("dummy") is not NullBackend
    assert known_types().count("dummy") == 1


def test_a_type_that_two_distributions_claim_is_refused_naming_both(distribution: Install) -> None:
    distribution("kvtier-one", {"null": f"{HERE}:NullBackend"})
    distribution("kvtier-two", {"null": f"{HERE}:Shelf.Inner"})
    message = refused("null")
    assert f"{HERE}:NullBackend (kvtier-one)" in message
    assert f"{HERE}:Shelf.Inner (kvtier-two)" in message


def test_an_unknown_type_is_refused_with_the_closest_one_and_all_that_are_known(distribution: Install) -> None:
    distribution("kvtier-null", {"null": f"{HERE}:NullBackend"})
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
def test_a_name_that_is_almost_a_type_is_refused(type_name: str, message: str) -> None:
    assert refused(type_name).startswith(message.format(name=type_name))


def test_a_module_that_is_not_there_is_named() -> None:
    assert refused("kvtier_nowhere.deep:Tier").endswith("there is no module 'kvtier_nowhere' to import")
    assert refused("kvtier.nowhere:Tier").endswith("there is no module 'kvtier.nowhere' to import")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import kvtier_no_such.deep\n", "needs the module 'kvtier_no_such', which is not installed"),
        ("raise ImportError('libfabric.so.1: cannot open')\n", "cannot be imported: libfabric.so.1: cannot open"),
    ],
)
def test_a_dependency_that_cannot_be_imported_is_named_and_the_cause_is_kept(
    module: Install, source: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        backend_class(f"{module(source)}:Tier")
    assert isinstance(caught.value.__cause__, ImportError)


BUGS: list[tuple[str, type[Exception]]] = [
    ("1 / 0\n", ZeroDivisionError),
    ("def f(:\n", SyntaxError),
    ("import os; os.nothing\n", AttributeError),
    ("undefined\n", NameError),
    ("import importlib; importlib.import_module(__name__ + '.missing')\n", ModuleNotFoundError),
]


@pytest.mark.parametrize(("source", "kind"), BUGS)
def test_a_bug_in_a_module_comes_out_as_it_is(module: Install, source: str, kind: type[Exception]) -> None:
    with pytest.raises(kind):
        backend_class(f"{module(source)}:Tier")


NOT_WHOLE: list[tuple[str, Any]] = [
    ("Nothing", f"module {HERE!r} has no 'Nothing'"),
    ("Shelf.Nothing", f"module {HERE!r} has no 'Shelf.Nothing'"),
    ("Shelf", "is no subclass of kvtier.backend.Backend"),
    ("Shelf.number", "3 is no subclass of kvtier.backend.Backend"),
    ("Unfinished", "Unfinished does not implement probe"),
    ("Shelf.Forgetful", "Forgetful.durability is no Durability"),
    ("Shelf.Optionless", "Optionless.options_type is no msgspec.Struct"),
    ("Shelf.Lax", "Lax.options_type is not both frozen and closed to unknown fields"),
    ("Shelf.Anywhere", "Anywhere.runner is 'thread'; 'process' or None accepted"),
    ("Shelf.Nowhere", "Nowhere.locality is 'remote'; 'LOCAL', 'REMOTE' or None accepted"),
]


@pytest.mark.parametrize(("name", "message"), NOT_WHOLE)
def test_an_incomplete_backend_is_refused_with_what_it_lacks(name: str, message: str) -> None:
    assert refused(f"{HERE}:{name}").endswith(message)


def test_the_abstract_backend_itself_is_refused() -> None:
    assert refused("kvtier.backend.contract:Backend").endswith(
        "does not implement aclose, delete, load, open, probe, store"
    )


def test_a_tier_of_a_service_is_remote_unless_its_configuration_says_otherwise() -> None:
    tiers = [{"type": "redis"}, {"type": "object", "url": "s3://bucket", "locality": "LOCAL"}, {"type": "dummy"}]
    config = EngineConfig.from_dict({"cpu_bytes_to_use": "1MiB", "chunk_bytes": 4_096, "secondary_tiers": tiers})
    assert [tier.locality for tier in settled(config).secondary_tiers] == ["REMOTE", "LOCAL", None]
