"""A hundred requests wait for a tier, over a primary that holds a tenth of them: the queue moves, and in order.

The engine is a model (`tests.simulation.scheduler`) in virtual time: a step of 20 ms, sixteen requests at a
time, `prefill_chunks` computed a step. Without leases, waiting requests evict each other's prefixes: what a tier loaded
for one goes to make room for the next.

    python -m tests.engine.test_pressure

prints the table of the page on look-ups.
"""

import asyncio
import sys
from itertools import product
from pathlib import Path
from typing import NamedTuple

import pytest

from kvtier.engine.manager import TieringOffloadingManager
from kvtier.testing import virtual_time
from tests.engine.kit import CHUNK_BYTES, describe, key, ledger_in
from tests.simulation.audit import AuditedManager, audit_quiet
from tests.simulation.scheduler import Pace, Prompt, Scheduler, Served
from tests.simulation.witness import chunk_of

pytestmark = pytest.mark.virtual_time

REQUESTS, CHUNKS_A_REQUEST = 100, 20
ROWS = REQUESTS * CHUNKS_A_REQUEST // 10
PACE = Pace(step_s=0.02, running_max=16, prefill_chunks=2, decode_s=0.2)
PROMPTS = [
    Prompt(str(request), [key(request * 1_000 + index) for index in range(CHUNKS_A_REQUEST)])
    for request in range(REQUESTS)
]


class Run(NamedTuple):
    served: list[Served]
    seconds: float
    hits: int
    promoted: int


async def serve(rows=ROWS, prompts=PROMPTS, manager=TieringOffloadingManager, chunks_per_s=200, pace=PACE, **limits):
    device = {"type": "dummy", "latency_s": 0.001, "bandwidth_bytes_per_s": chunks_per_s * CHUNK_BYTES}
    limits = {"lease_share": 0.5, "lease_s": 10.0} | limits
    async with await manager.open(describe(rows, device, limits=limits)) as engine:
        for prompt in prompts:
            await engine.put(prompt.keys, [chunk_of(key, CHUNK_BYTES) for key in prompt.keys])
        await engine.reset(10_000)
        begun = asyncio.get_running_loop().time()
        served = await Scheduler(engine, prompts, pace).run()
        seconds = asyncio.get_running_loop().time() - begun
        await asyncio.sleep(60)
        engine.steps.end_step()
        audit_quiet(engine)
        (tier,) = ledger_in(engine).tiers
        return Run(served, seconds, sum(one.hits for one in served), tier.counters.promoted)


@pytest.fixture(scope="module")
def leased():
    return virtual_time.run(serve())


@pytest.fixture(scope="module")
def unleased():
    return virtual_time.run(serve(lease_s=0.0, lease_share=1.0))


def test_every_request_is_served_and_no_promotion_is_in_vain(leased):
    assert sorted(int(one.id) for one in leased.served) == list(range(REQUESTS))
    assert leased.hits == leased.promoted > REQUESTS * CHUNKS_A_REQUEST / 2


def test_leases_keep_waiting_requests_from_evicting_each_other(leased, unleased):
    assert leased.hits > 2 * unleased.hits
    assert leased.promoted < unleased.promoted
    assert leased.seconds < unleased.seconds
    assert len(unleased.served) == REQUESTS
    assert unleased.promoted <= 2 * REQUESTS * CHUNKS_A_REQUEST, "none looks for ever"


@pytest.mark.promise("The primary is full of waiting requests")
def test_a_promotion_beyond_the_share_is_computed_so_a_slow_tier_does_not_set_the_pace(leased):
    loading_all_s = REQUESTS * CHUNKS_A_REQUEST / 200
    computing_all_s = REQUESTS * CHUNKS_A_REQUEST / (PACE.prefill_chunks / PACE.step_s)
    assert leased.seconds < loading_all_s < computing_all_s


def test_the_first_requests_do_not_wait_longest(leased):
    waits = {int(one.id): one.waited_s for one in leased.served}
    first, last = (max(waits[request] for request in half) for half in (range(50), range(50, 100)))
    assert first < last


@pytest.mark.parametrize("rows", [1, 19])
async def test_a_primary_smaller_than_any_request_serves_them_all(rows):
    run = await serve(rows=rows, prompts=PROMPTS[:20], manager=AuditedManager)
    assert len(run.served) == 20
    assert run.hits == run.promoted


@pytest.mark.promise("A prefix exceeds `lease_share` of the primary")
async def test_a_prefix_that_exceeds_the_share_gives_its_leading_part():
    run = await serve(rows=20, lease_share=0.5, prompts=PROMPTS[:1])
    assert [one.hits for one in run.served] == [10]


def table():
    """Yield the table's lines: for each pace of the accelerator and of the tier, with default leases and without."""
    for computed, chunks_per_s in product((2, 8), (200, 1_000)):
        pace = {"chunks_per_s": chunks_per_s, "pace": PACE._replace(prefill_chunks=computed)}
        runs = virtual_time.run(serve(**pace)), virtual_time.run(serve(lease_s=0.0, lease_share=1.0, **pace))
        seconds = [f"{run.seconds:.1f}" for run in runs]
        counts = [
            f"{count:,}" for count in (chunks_per_s, *(run.hits for run in runs), *(run.promoted for run in runs))
        ]
        yield f"| {' | '.join((str(computed), counts[0], *seconds, *counts[1:]))} |"


def test_the_table_of_the_page_on_look_ups_is_this(thorough):
    assert "\n".join(table()) in (Path(__file__).parents[2] / "docs" / "explanation" / "look-ups.md").read_text()


if __name__ == "__main__":
    sys.stdout.writelines(f"{line}\n" for line in table())
