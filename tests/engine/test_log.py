import logging
import os
import re
import signal

import pytest

from kvtier import __version__
from kvtier.errors import Remedy
from tests.engine.kit import FAULTY, at_rest, ledger_in, until


@pytest.fixture(autouse=True)
def log(caplog):
    caplog.set_level(logging.INFO, "kvtier")
    return caplog


def lines(log, start):
    return [line for line in log.messages if line.startswith(start)]


async def test_an_engine_logs_its_configuration_and_how_much_memory_it_takes_when_it_starts(open_engine, log, runner):
    engine = await open_engine(512, {"type": "dummy"}, runner=runner)
    before, after, *_ = log.messages
    assert before == "taking 2 MiB of host memory"
    assert re.fullmatch(r"took 2 MiB of host memory in \d+\.\d s", after)
    (line,) = lines(log, "kvtier ")
    what = f"kvtier {__version__}: 512 rows of 4,096 bytes (lru); tiers: 0:dummy; {runner} runner, process "
    assert line.startswith(what)
    pid = int(line.rpartition(" ")[2])
    assert (pid == os.getpid()) == (runner != "process")
    if runner == "process":
        assert engine.steps._bridge.pid == pid


@pytest.mark.parametrize("layout", ["files", "segments"])
async def test_an_fs_tier_logs_its_configuration_and_the_chunks_that_it_found(
    open_engine, log, runner, layout, tmp_path
):
    tier = {"type": "fs", "name": "disk", "root": str(tmp_path / "tier"), "layout": layout, "capacity_bytes": "64MiB"}
    first = await open_engine(8, tier, runner=runner, holds=range(3))
    assert await at_rest(first)
    await first.aclose()
    log.clear()
    engine = await open_engine(8, tier, runner=runner)
    await until(lambda: lines(log, "tier disk"), engine)
    (line,) = lines(log, "tier disk")
    naming = ", naming vllm" if layout == "files" else ""
    said = f"tier disk: root {tmp_path}/tier, layout {layout}{naming}, capacity 64.0 MiB; found 3 chunks"
    assert re.fullmatch(re.escape(said) + r" of \d+\.\d [KM]iB in \d+\.\d\d s", line), line


@pytest.mark.parametrize("level", [logging.INFO, logging.ERROR])
async def test_log_records_of_a_runners_process_appear_in_the_owners_log_by_its_level(outside, open_engine, log, level):
    log.set_level(level, "kvtier")
    failing = {"type": FAULTY, "name": "ill", "inner": {"type": "dummy"}, "script": {"store": ["unavailable"]}}
    engine = await open_engine(8, failing, runner="process", holds=[1])
    assert await at_rest(engine)
    if level == logging.ERROR:
        await engine.aclose()
        assert log.messages == []
        return
    await until(lambda: lines(log, "tier ill: the tier cannot be reached"), engine)
    (record,) = [record for record in log.records if "cannot be reached" in record.getMessage()]
    assert (record.name, record.levelno, record.filename) == ("kvtier.runner.runner", logging.WARNING, "runner.py")
    assert record.process == engine.steps._bridge.pid
    assert record.funcName == "_result"
    assert record.getMessage().endswith(f"; see {Remedy.UNAVAILABLE}")


async def test_the_replacement_of_a_lost_runner_is_logged(outside, open_engine, log):
    engine = await open_engine(8, {"type": "dummy", "name": "own"}, runner="process")
    lost = engine.steps._bridge.pid
    await until(lambda: lines(log, "tier own"), engine)
    os.kill(lost, signal.SIGKILL)
    await until(lambda: len(lines(log, "tier own")) == 2, engine)
    await until(lambda: ledger_in(engine).runner_up, engine)
    assert lines(log, f"runner {lost} is lost; starting another")
    assert lines(log, f"runner {engine.steps._bridge.pid} takes its place")
