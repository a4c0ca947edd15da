"""A real Prometheus scrapes an engine that works: it answers every query, of the board, the alerts and the page."""

import asyncio
import json
import math
import re
from contextlib import contextmanager
from itertools import count
from urllib.error import URLError
from urllib.parse import urlencode
from urllib.request import urlopen

from kvtier.engine.manager import TieringOffloadingManager
from tests.engine.kit import FAULTY, PATIENCE_S, chunk, describe, key, store
from tests.monitoring.queries import EXAMPLES, of_the_alerts, of_the_board, of_the_page
from tests.remote.servers import ServerProcess, free_port, until
from tests.serving import served

CHUNKS = 24  # In one prompt.
ROWS = 64
OFFERED, NEVER_PUT = 1 << 30, 1 << 40  # Numbers of chunks, apart from those of prompts.


@contextmanager
def scraping(program, port, folder):
    config = {
        "global": {"scrape_interval": "100ms", "scrape_timeout": "100ms", "evaluation_interval": "1s"},
        "rule_files": [str(EXAMPLES / "alerts.yaml")],
        "scrape_configs": [{"job_name": "kvtier", "static_configs": [{"targets": [f"127.0.0.1:{port}"]}]}],
    }
    (folder / "prometheus.json").write_text(json.dumps(config))
    own = free_port()
    given = {
        "config.file": folder / "prometheus.json",
        "storage.tsdb.path": folder / "data",
        "web.listen-address": f"127.0.0.1:{own}",
    }
    command = [program, *(f"--{name}={value}" for name, value in given.items())]
    process = ServerProcess(command, folder / "prometheus.log")
    try:
        until(lambda: is_ready(own, process))
        yield f"http://127.0.0.1:{own}"
    finally:
        process.kill()


def is_ready(port, process):
    process.check()
    try:
        with urlopen(f"http://127.0.0.1:{port}/-/ready", timeout=PATIENCE_S):
            return True
    except URLError:  # Nobody listens yet, or it is reading its own log.
        return False


def engine_of(folder):
    """Describe an engine whose first tier evicts, and whose second one fails, is asked and is behind."""
    disk = {"type": "fs", "name": "disk", "root": str(folder), "layout": "files", "capacity_bytes": "1MiB"}
    peer = {
        "type": FAULTY,
        "name": "peer",
        "inner": {"type": "dummy", "capacity_bytes": "64MiB", "latency_s": "1ms", "shared": True},
        "faults": {"failed": 0.1, "no_space": 0.1, "corrupt": 0.1},
        "limits": {"store_chunks_in_flight": 8, "breaker_failures": 1_000_000},
    }
    return describe(ROWS, disk, peer, prefill_tokens_per_s=20.0)


async def work(engine):
    for number in count():
        numbers = range(number * CHUNKS, (number + 1) * CHUNKS)
        await engine.put([key(each) for each in numbers], [chunk(each) for each in numbers])
        for back in (1, 3, 8):  # In the primary, on the disk, and where the disk has evicted it.
            before = range(max(0, number - back) * CHUNKS, max(1, number - back + 1) * CHUNKS)
            await engine.get([key(each) for each in before])
        await engine.get([key(NEVER_PUT + number)])
        await engine.drain()
        store(engine, range(OFFERED + number * CHUNKS, OFFERED + (number + 1) * CHUNKS))  # Without waiting for room.
        await asyncio.sleep(0.01)  # As an LLM engine, it has other things to do.


def answered(address, query):
    """Ask Prometheus; return the values that are numbers. A wrong query fails."""
    with urlopen(f"{address}/api/v1/query?{urlencode({'query': query.asked})}", timeout=PATIENCE_S) as reply:
        answer = json.load(reply)
    assert answer["status"] == "success", (query, answer)
    values = [float(series["value"][1]) for series in answer["data"]["result"]]
    return [value for value in values if not math.isnan(value)]


def without_threshold(alert):
    """Return what an alert compares: where all is well its query has no series."""
    return alert._replace(expr=re.sub(r"\s*(==|>) [\d.]+\s*$", "", alert.expr))


async def test_every_query_of_board_alerts_and_page_has_an_answer(programs, tmp_path):
    prometheus, _ = programs
    config = engine_of(tmp_path / "disk")
    open_queries = [*of_the_board(), *map(without_threshold, of_the_alerts()), *of_the_page()]
    async with TieringOffloadingManager.open(config) as engine:
        with served(engine.metrics) as port, scraping(prometheus, port, tmp_path) as address:
            worker = asyncio.create_task(work(engine))
            try:
                async with asyncio.timeout(PATIENCE_S):
                    while open_queries := [each for each in open_queries if not await has_answer(address, each)]:
                        assert not worker.done(), worker.exception()
                        await asyncio.sleep(0.2)
            except TimeoutError:
                raise AssertionError(f"without an answer: {[each.where for each in open_queries]}") from None
            finally:
                worker.cancel()
                await asyncio.gather(worker, return_exceptions=True)


async def has_answer(address, query):
    return bool(await asyncio.to_thread(answered, address, query))
