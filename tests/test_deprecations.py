"""What 0.1.0 had and 0.2.0 calls something else: it still works and warns, or is refused with its new name."""

import re
from pathlib import Path

import pytest

import kvtier
import kvtier.backend
import kvtier.errors
import kvtier.policies
import kvtier.settings
from kvtier import ConfigError, EngineConfig, StepManager, TieringOffloadingManager, make_offload_key
from kvtier.backend.contract import backend_class
from kvtier.tools import statuses
from kvtier.tools.commands import COMMANDS, MOVED, run
from kvtier_backends.dummy import DummyBackend

STABILITY = (Path(__file__).parents[1] / "docs" / "reference" / "stability.md").read_text()
LISTED = """
    Abandoned Added Backend BackendClosed BackendError BackendUnavailable BlockCorrupt BlockError BlockMissing
    ConfigError Durability EngineClosed EngineConfig EngineLimits Event EventKind FileMapper Group Inventory
    InventoryEvent KVTierError LookupResult Measured Namespace NoSpace Occupancy OffloadKey Outcome Policy Ranked Read
    Removed ScanDone StorePlan TierConfig TierContext TierLimits TierMatcher TieringOffloadingManager TraceError
    TransferFailed Write chunk_hash decode group_index load_config make_offload_key
"""
NAMES_OF_0_1 = frozenset(LISTED.split())
OLD_NAMES = NAMES_OF_0_1 - {*kvtier.__all__}
ERRORS_OF_0_1 = {"BlockCorrupt": "ChunkCorrupt", "BlockError": "ChunkError", "BlockMissing": "ChunkMissing"}
CONFIG = {"cpu_bytes_to_use": 8192, "chunk_bytes": 4096}


@pytest.mark.parametrize("name", sorted(OLD_NAMES))
def test_a_name_of_the_last_version_works_and_the_warning_says_where_it_is_now(name: str) -> None:
    with pytest.deprecated_call(match=rf"^kvtier\.{name} goes with 0\.3\.0: use [\w.]+$") as told:
        found = getattr(kvtier, name)
    assert told[0].filename == __file__
    *modules, now = str(told[0].message).rpartition(" ")[2].removeprefix("kvtier.").split(".")
    if name not in ("decode", "load_config"):
        (module,) = modules
        assert found is getattr(getattr(kvtier, module), now)


def test_a_name_that_was_never_there_is_no_deprecated_one() -> None:
    for module in (kvtier, kvtier.errors):
        with pytest.raises(AttributeError, match="'Blocks'"):
            _ = module.Blocks  # type: ignore[attr-defined]
    assert OLD_NAMES.isdisjoint(dir(kvtier))


def test_a_configuration_is_read_as_in_the_last_version(tmp_path: Path) -> None:
    with pytest.deprecated_call(match="EngineConfig.from_dict"):
        from kvtier import decode
    with pytest.deprecated_call(match="EngineConfig.load"):
        from kvtier import load_config
    assert decode(EngineConfig, CONFIG) == EngineConfig.from_dict(CONFIG)
    (tmp_path / "engine.toml").write_text("cpu_bytes_to_use = 8192\nchunk_bytes = 4096\n")
    assert load_config(tmp_path / "engine.toml") == EngineConfig.from_dict(CONFIG)


@pytest.mark.parametrize(("old", "new"), ERRORS_OF_0_1.items())
def test_an_error_has_its_old_name_where_errors_are(old: str, new: str) -> None:
    with pytest.deprecated_call(match=f"use kvtier.errors.{new}"):
        assert getattr(kvtier.errors, old) is getattr(kvtier.errors, new)


async def test_the_asyncio_face_has_its_old_verbs() -> None:
    async with TieringOffloadingManager.open(EngineConfig.from_dict(CONFIG | {"runner": "inline"})) as engine:
        key = make_offload_key(b"key")
        await engine.put([key], [bytes(4096)])
        with pytest.deprecated_call(match="use drain"):
            assert await engine.drained()
        with pytest.deprecated_call(match="use reset"):
            assert await engine.areset()
        assert await engine.get([key]) == []


async def test_an_engine_is_opened_with_and_without_await() -> None:
    config = EngineConfig.from_dict(CONFIG | {"runner": "inline"})
    async with await TieringOffloadingManager.open(config) as engine:
        assert engine.config == config


def test_the_step_protocol_is_started_and_ended_by_its_old_names() -> None:
    with pytest.deprecated_call(match="use StepManager.start"):
        engine = TieringOffloadingManager.start(EngineConfig.from_dict(CONFIG))
    assert isinstance(engine, StepManager)
    with pytest.deprecated_call(match="use close"):
        assert engine.shutdown() == 0
    with pytest.raises(kvtier.EngineClosed):
        engine.lookup(make_offload_key(b"key"), "request")


def test_what_a_tier_is_given_to_store_has_its_old_name() -> None:
    write = kvtier.backend.Write(make_offload_key(b"key"), memoryview(b"row"))
    with pytest.deprecated_call(match=r"use Write\.row"):
        assert write.block is write.row
    assert write._fields == ("key", "row")


class OfTheLastVersion(DummyBackend):
    """A tier whose options have the name that 0.1.0 looked for."""

    Options = DummyBackend.options_type
    options_type = None  # type: ignore[assignment]


def test_a_tier_of_the_last_version_is_refused_with_the_name_that_it_lacks() -> None:
    with pytest.raises(ConfigError, match="call it options_type, and no longer Options"):
        backend_class(f"{__name__}:OfTheLastVersion")


@pytest.mark.parametrize("command", MOVED)
def test_a_command_of_the_last_version_is_refused_with_what_does_it_now(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command not in COMMANDS
    assert run([*command.split(), "--rounds", "1"]) == statuses.REFUSED
    (line,) = capsys.readouterr().err.splitlines()
    assert f"`python -m tests.benchmarks.protocol {command.split()[1]}`" in line


def test_the_page_on_stability_names_all_that_is_deprecated() -> None:
    section = STABILITY.partition("\n## What 0.1.0 called otherwise\n")[2].partition("\n## ")[0]
    named = {*re.findall(r"\w+", section)}
    assert OLD_NAMES | {"start", "areset", "drained", "shutdown", "block", "Options", "lookup", "steps"} <= named


def test_a_deprecated_name_goes_with_a_version_that_is_not_here_yet() -> None:
    assert [int(part) for part in kvtier.__version__.split(".")[:2]] < [0, 3]
