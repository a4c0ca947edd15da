"""Steps over several tiers and numbers of keys, beside a step over one tier with few keys.

A step's cost must not grow with the number of held keys. The figure is processor time of the owner's thread. The runner
answers at once, so that outcomes are applied, too.

    python -m tests.benchmarks.protocol
"""

import random
import time
from contextlib import ExitStack
from typing import NamedTuple

from kvtier import EngineConfig, EngineLimits, StepManager, TierConfig, TierLimits, make_offload_key
from kvtier.memory import Region
from kvtier.runner.bridge import Bridge
from kvtier.runner.messages import Cascade, Delete, Finished, Found, Promote, Scanned, pack_keys
from kvtier.tools.figures import ROUNDS, Side, interleaved, rate_of, row_of, run_bench

ROWS = 65_536
KEYS_A_REQUEST = 32
REQUESTS_A_STEP = 64
CHUNK_BYTES = 4_096
REPORT_KEYS = 4_096  # Of one report of held keys.


class Echo(Bridge):
    kind = "echo"

    def send(self, actions):
        done = [Finished(each.id, b"", b"", 0.0) for each in actions if isinstance(each, Promote | Cascade | Delete)]
        self.mailbox.extend(done)
        return ()

    def admit(self, epoch):
        raise AssertionError(epoch)

    def replace(self):
        return False

    def close(self, deadline_s):  # Nothing is under way.
        return 0


class Caller:
    def __init__(self, manager, end_step, request=str, planned="keys"):
        self.manager, self._end_step, self._request, self._planned = manager, end_step, request, planned
        self._requests = 0

    @staticmethod
    def random_keys(count, dice):
        keys = [make_offload_key(dice.randbytes(32)) for _ in range(count)]
        return [keys[start : start + KEYS_A_REQUEST] for start in range(0, count, KEYS_A_REQUEST)]

    def each(self, batches, call):
        for keys in batches:
            request = self._begin()
            call(keys, request)
            self.manager.on_request_finished(request)
            self._end_step()

    def step(self, batches):
        """Make one step of all batches, each a request with new keys: looked up, prepared, completed, cascaded."""
        requests = [self._begin() for _ in batches]
        for keys, request in zip(batches, requests, strict=True):
            self.look_up(keys, request)
            self.store(keys, request)
        self._end_step()
        for request in requests:
            self.manager.on_request_finished(request)

    def look_up(self, keys, request):
        for key in keys:
            self.manager.lookup(key, request)

    def store(self, keys, request):
        self.manager.complete_store(getattr(self.manager.prepare_store(keys, request), self._planned), request)

    def load(self, keys, request):
        self.manager.touch(keys, request)
        self.manager.prepare_load(keys, request)
        self.manager.complete_load(keys, request)

    def _begin(self):
        self._requests += 1
        request = self._request(self._requests)
        self.manager.on_new_request(request)
        return request


class Steps(Caller):
    def __init__(self, rows=ROWS, tiers=0, *, seed=7):
        limits = TierLimits(store_chunks_in_flight=rows, store_bytes_in_flight=rows * CHUNK_BYTES)
        config = EngineConfig(
            cpu_bytes_to_use=rows * CHUNK_BYTES,
            chunk_bytes=CHUNK_BYTES,
            secondary_tiers=tuple(TierConfig(type="dummy", limits=limits) for _ in range(tiers)),
            limits=EngineLimits(cascade_share=1.0),
        )
        self.rows, self.bridge = rows, Echo()
        manager = StepManager(config, Region.private(rows, CHUNK_BYTES), self.bridge)
        super().__init__(manager, manager.end_step)
        self._random = random.Random(seed)

    def hold(self, keys):
        """Report this number of keys for every tier, and complete its scan. No request uses these keys."""
        for tier in range(len(self.manager.config.secondary_tiers)):
            for start in range(0, keys, REPORT_KEYS):
                named = [index.to_bytes(32, "big") for index in range(start, min(start + REPORT_KEYS, keys))]
                self.bridge.mailbox.append(Found(tier, pack_keys([make_offload_key(name) for name in named])))
                self.manager.end_step()
            self.bridge.mailbox.append(Scanned(tier, complete=True))
            self.manager.end_step()

    def new_keys(self, count=None):
        return self.random_keys(count or self.rows, self._random)


STEPS_A_ROUND = 16
STEP_KEYS = REQUESTS_A_STEP * KEYS_A_REQUEST


class Engine(NamedTuple):
    tiers: int
    held: int

    def side(self, stack):
        steps = Steps(tiers=self.tiers)
        stack.callback(steps.manager.close)
        steps.hold(self.held)
        steps.each(steps.new_keys(), steps.store)
        new = []

        def prepare():
            new[:] = [steps.new_keys(STEP_KEYS) for _ in range(STEPS_A_ROUND)]

        def work():
            for batches in new:
                steps.step(batches)

        return Side(str(self), rate_of(work, STEPS_A_ROUND * STEP_KEYS, time.thread_time), prepare)


def measure(engines, rounds):
    with ExitStack() as stack:
        measured = interleaved([engine.side(stack) for engine in engines], rounds)
    first, *others = engines
    limit_is = f"a step over {first.tiers} tier with {first.held:,} keys"
    for engine in others:
        figures, limits = measured[str(engine)], measured[str(first)]
        yield row_of("step", figures, limits, limit_is, engine._asdict(), unit="million keys/s")


if __name__ == "__main__":
    compared = [Engine(1, 10_000), Engine(2, 10_000), Engine(4, 10_000), Engine(1, 1_000_000)]
    run_bench("protocol", lambda: measure(compared, ROUNDS), None)
