"""What is frozen stays as it is, or `tests.frozen.freeze` writes it again with the change that explains it."""

import json
import tarfile

import pytest

from kvtier import TieringOffloadingManager, make_offload_key
from tests.benchmarks.compare import stored
from tests.benchmarks.hot import CALIBRATION, CASES
from tests.frozen import golden
from tests.frozen.freeze import FROZEN, GENERATED, REAL, names, promises

frozen = json.loads(FROZEN.read_text())


def test_public_names_are_those_that_were_frozen():
    assert names() == frozen["names"]


def test_the_conformance_suite_keeps_every_frozen_promise():
    assert promises() == frozen["promises"]


def test_every_hot_function_runs_twice_and_has_a_stored_cost():
    for case in CASES.values():
        work = case.make()
        assert work() == work()
    assert set(stored("3.11")) == set(CASES) - {CALIBRATION}


@pytest.mark.parametrize("name", GENERATED)
def test_the_generated_workload_gives_the_frozen_figures(name, outside):
    assert GENERATED[name]() == frozen["generated"][name]


@pytest.mark.parametrize("name", REAL)
def test_a_real_trace_gives_the_frozen_figures(name, traces, outside):
    file, figures = REAL[name]
    assert figures(str(traces / file)) == frozen["real"][name]


@pytest.mark.parametrize("checkpoint", [True, False], ids=["as it was left", "without its checkpoint"])
@pytest.mark.parametrize("layout", golden.LAYOUTS)
async def test_a_golden_directory_loads_chunk_by_chunk_and_is_written_on(layout, checkpoint, tmp_path):
    with tarfile.open(golden.GOLDEN / f"{layout}.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    root = tmp_path / "root"
    for path in root.rglob("index_*"):
        if not checkpoint:
            path.unlink()
    keys, new = list(golden.CHUNKS), make_offload_key(b"new")
    async with TieringOffloadingManager.open(golden.config_of(layout, root)) as engine:
        async with engine.fetch(keys) as views:
            assert dict(zip(keys, map(bytes, views), strict=True)) == golden.CHUNKS
        assert engine.stats().tiers[0].loaded == len(keys)
        await engine.put([new], [b"n" * golden.CHUNK_BYTES])
    async with (
        TieringOffloadingManager.open(golden.config_of(layout, root)) as engine,
        engine.fetch([*keys, new]) as views,
    ):
        assert len(views) == len(keys) + 1
