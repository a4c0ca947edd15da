"""kvtier's manager beside vLLM's own (0.32), each through vLLM's own interface, on the scheduler's thread alone.

    PYTHONPATH=.:backends PEERS/vllm/bin/python -m tests.benchmarks.peers.vllm_protocol

The same keys in turn, in one process, in CPU time of the thread; nothing moves. Look-ups, stores that evict as many,
and loads stand beside vLLM's `CPUOffloadingManager`; a whole step (64 requests of 32 keys each: looked up, prepared,
completed, cascaded to one tier) beside its `TieringOffloadingManager`, whose tier, like kvtier's runner here, has done
everything at once. Figures are kvtier's, limits vLLM's: a ratio of 2 means half of vLLM's time.
"""

import gc
import random
import time
import uuid
from functools import partial

from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager
from vllm.v1.kv_offload.tiering.manager import (
    CPUPrimaryTierOffloadingManager,
    RequestOffloadingContext,
    TieringOffloadingManager,
)

from kvtier.integrations.vllm.manager import VllmManager
from kvtier.integrations.vllm.stats import Stats
from kvtier.tools.figures import Side, interleaved, rate_of, row_of
from tests.benchmarks.peers.side_by_side import arguments, give_out
from tests.benchmarks.protocol import CHUNK_BYTES, KEYS_A_REQUEST, REQUESTS_A_STEP, ROWS, Caller, Steps

STEPS_A_ROUND = 16
VLLM = "vLLM's manager"
UNIT = "million keys/s"


class InstantTier(SecondaryTierManager):
    """A tier of vLLM's that has done everything by the time it is asked, and holds nothing."""

    def __init__(self, view):
        super().__init__(None, view, "instant")
        self._done = []

    def lookup(self, key, req_context):
        return LookupResult.MISS

    def submit_store(self, job_metadata):
        self._done.append(JobResult(job_metadata.job_id, success=True))

    def submit_load(self, job_metadata):
        raise AssertionError(job_metadata)

    def get_finished_jobs(self):
        done, self._done = self._done, []
        return done

    def on_new_request(self, req_context):
        return RequestOffloadingContext()

    def drain_jobs(self):
        pass


def caller_of(manager):
    end_step = partial(manager.on_schedule_end, ScheduleEndContext((), ()))
    return Caller(manager, end_step, lambda number: ReqContext(req_id=str(number)), "keys_to_store")


def kvtier_caller(tiers):
    steps = Steps(tiers=tiers)
    steps.hold(0)
    return caller_of(VllmManager(steps.manager, Stats()))


def vllm_tiering():
    region = SharedOffloadRegion(
        engine_id=f"bench-{uuid.uuid4()}",
        num_chunks=ROWS,
        rank=None,
        kv_bytes_per_chunk=CHUNK_BYTES,
        cpu_page_size=CHUNK_BYTES,
    )
    primary = CPUPrimaryTierOffloadingManager(ROWS, region)
    return caller_of(TieringOffloadingManager(primary, [InstantTier(primary.get_kv_memoryview())]))


def measure(rounds):
    """Yield rows of keys a second. The garbage collector runs between measurements only."""
    gc.disable()
    yield from _operations(rounds)
    ours, theirs = kvtier_caller(1), vllm_tiering()
    dice = random.Random(3)
    for caller in (ours, theirs):
        caller.each(Caller.random_keys(ROWS, dice), caller.store)
    measured = interleaved([_steps_of("kvtier", ours, dice), _steps_of("vllm", theirs, dice)], rounds)
    theirs.manager.shutdown()
    settings = {"requests": REQUESTS_A_STEP, "keys_a_request": KEYS_A_REQUEST}
    yield row_of("one step, one tier", measured["kvtier"], measured["vllm"], VLLM, settings, unit=UNIT)


def _steps_of(name, caller, dice):
    new, keys = [], REQUESTS_A_STEP * KEYS_A_REQUEST

    def work():
        for batches in new:
            caller.step(batches)

    return Side(
        name,
        rate_of(work, STEPS_A_ROUND * keys, time.thread_time),
        lambda: _renew(new, [Caller.random_keys(keys, dice) for _ in range(STEPS_A_ROUND)]),
    )


def _operations(rounds):
    dice, sides = random.Random(7), []
    for name, make in (("kvtier", lambda: kvtier_caller(0)), ("vllm", lambda: caller_of(CPUOffloadingManager(ROWS)))):
        storing, loading = make(), make()
        present = Caller.random_keys(ROWS, random.Random(11))
        loading.each(present, loading.store)
        storing.each(Caller.random_keys(ROWS, dice), storing.store)
        new = []
        for what, caller, batches, prepare in (
            ("look up", loading, present, gc.collect),
            ("load", loading, present, gc.collect),
            ("store", storing, new, lambda n=new: _renew(n, Caller.random_keys(ROWS, dice))),
        ):
            call = {"look up": caller.look_up, "load": caller.load, "store": caller.store}[what]
            work = partial(caller.each, batches, call)
            sides.append(Side(f"{what} {name}", rate_of(work, ROWS, time.thread_time), prepare))
    measured = interleaved(sides, rounds)
    for name, operation in (
        ("look up", "look-up in the primary"),
        ("store", "prepare_store + complete_store, evicting"),
        ("load", "touch + prepare_load + complete_load"),
    ):
        yield row_of(operation, measured[f"{name} kvtier"], measured[f"{name} vllm"], VLLM, {"keys": ROWS}, unit=UNIT)


def _renew(kept, new):
    kept[:] = new
    gc.collect()


if __name__ == "__main__":
    given = arguments(__doc__)
    give_out("peers vllm_protocol", given, lambda folder: measure(given.rounds))
