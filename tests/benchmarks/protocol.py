"""The step protocol on one core: look-ups, stores, loads, and whole steps over several tiers and numbers of keys.

The figure is processor time of the owner's thread. The limit is a Python loop over the same number of operations on a
bare dictionary. A step is also compared with the same step over one tier with few keys: its cost must not grow with
the number of held keys. The runner answers at once, so that outcomes are applied, too.

    python -m tests.benchmarks.protocol
"""

import random
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import NamedTuple

from kvtier.backend import OffloadKey, make_offload_key
from kvtier.config import EngineConfig, EngineLimits, TierConfig, TierLimits
from kvtier.engine.steps import StepManager
from kvtier.memory import Region
from kvtier.runner.bridge import Bridge
from kvtier.runner.messages import Action, Cascade, Delete, Finished, Found, Promote, Scanned, pack_keys
from kvtier.tools.bench import run_bench
from kvtier.tools.figures import ROUNDS, Pair, Row, Setting, Side, interleaved, row_of, steps_of

ROWS = 65_536
KEYS_A_REQUEST = 32
REQUESTS_A_STEP = 64
CHUNK_BYTES = 4_096
REPORT_KEYS = 4_096  # Of one report of held keys.


class Echo(Bridge):
    """A runner that answers every action at once."""

    kind = "echo"

    def send(self, actions: Sequence[Action]) -> Sequence[Action]:
        done = [Finished(each.id, b"", b"", 0.0) for each in actions if isinstance(each, Promote | Cascade | Delete)]
        self.mailbox.extend(done)
        return ()

    def admit(self, epoch: int) -> None:
        raise AssertionError(epoch)

    def replace(self) -> bool:
        return False

    def close(self, deadline_s: float) -> int:  # Nothing is under way.
        return 0


class Steps:
    """An engine whose rows are never touched, and requests of 32 keys each."""

    def __init__(self, rows: int = ROWS, tiers: int = 0, *, seed: int = 7) -> None:
        limits = TierLimits(store_chunks_in_flight=rows, store_bytes_in_flight=rows * CHUNK_BYTES)
        config = EngineConfig(
            cpu_bytes_to_use=rows * CHUNK_BYTES,
            chunk_bytes=CHUNK_BYTES,
            secondary_tiers=tuple(TierConfig(type="dummy", limits=limits) for _ in range(tiers)),
            limits=EngineLimits(cascade_share=1.0),
        )
        self.rows = rows
        self.region = Region.private(rows, CHUNK_BYTES)
        self.bridge = Echo()
        self.manager = StepManager(config, self.region, self.bridge)
        self._random = random.Random(seed)
        self._requests = 0

    def hold(self, keys: int) -> None:
        """Report this number of keys for every tier, and complete its scan. No request uses these keys."""
        for tier in range(len(self.manager.config.secondary_tiers)):
            for start in range(0, keys, REPORT_KEYS):
                named = [index.to_bytes(32, "big") for index in range(start, min(start + REPORT_KEYS, keys))]
                self.bridge.mailbox.append(Found(tier, pack_keys([make_offload_key(name) for name in named])))
                self.manager.end_step()
            self.bridge.mailbox.append(Scanned(tier, complete=True))
            self.manager.end_step()

    def new_keys(self, count: int | None = None) -> list[list[OffloadKey]]:
        """Return requests of new keys: `count` keys, or enough to fill the primary."""
        return self.random_keys(count or self.rows, self._random)

    @staticmethod
    def random_keys(count: int, dice: random.Random) -> list[list[OffloadKey]]:
        """Return random keys in requests of 32."""
        keys = [make_offload_key(dice.randbytes(32)) for _ in range(count)]
        return [keys[start : start + KEYS_A_REQUEST] for start in range(0, count, KEYS_A_REQUEST)]

    def each(self, batches: list[list[OffloadKey]], call: Callable[[list[OffloadKey], str], None]) -> None:
        """Make a request and a step of each batch."""
        for keys in batches:
            request_id = self._begin()
            call(keys, request_id)
            self.manager.on_request_finished(request_id)
            self.manager.end_step()

    def look_up(self, keys: list[OffloadKey], request_id: str) -> None:
        for key in keys:
            self.manager.lookup(key, request_id)

    def store(self, keys: list[OffloadKey], request_id: str) -> None:
        plan = self.manager.prepare_store(keys, request_id)
        assert plan is not None
        self.manager.complete_store(plan.keys, request_id)

    def load(self, keys: list[OffloadKey], request_id: str) -> None:
        self.manager.touch(keys, request_id)
        self.manager.prepare_load(keys, request_id)
        self.manager.complete_load(keys, request_id)

    def step(self, batches: list[list[OffloadKey]]) -> None:
        """Make one step of all batches, each a request with new keys: looked up, prepared, completed, cascaded."""
        requests = [self._begin() for _ in batches]
        for keys, request_id in zip(batches, requests, strict=True):
            self.look_up(keys, request_id)
            self.store(keys, request_id)
        self.manager.end_step()
        for request_id in requests:
            self.manager.on_request_finished(request_id)

    def close(self) -> None:
        self.manager.close()

    def _begin(self) -> str:
        self._requests += 1
        request_id = str(self._requests)
        self.manager.on_new_request(request_id)
        return request_id


LIMIT_IS = "dictionary operations"
STEPS_A_ROUND = 16
STEP_KEYS = REQUESTS_A_STEP * KEYS_A_REQUEST

Batches = list[list[OffloadKey]]


class Bare:
    """The dictionary operations that no engine can avoid."""

    def __init__(self, batches: Batches) -> None:
        self.table = OrderedDict((key, 0) for keys in batches for key in keys)

    def look_up(self, batches: Batches) -> None:
        get = self.table.get
        for keys in batches:
            for key in keys:
                get(key)

    def store(self, batches: Batches) -> None:
        """Insert keys, and remove as many of the oldest."""
        table, go = self.table, self.table.popitem
        for keys in batches:
            for key in keys:
                table[key] = 0
                go(last=False)

    def load(self, batches: Batches) -> None:
        """Look keys up, move them to the end, and look them up again."""
        renew, get = self.table.move_to_end, self.table.get
        for keys in batches:
            for key in keys:
                renew(key)
                get(key)

    def step(self, batches: Batches) -> None:
        self.look_up(batches)
        self.store(batches)


class Engine(NamedTuple):
    """A number of tiers, and of keys that each holds besides those of the steps."""

    tiers: int
    held: int

    @property
    def label(self) -> str:
        return f"step {self.tiers} {self.held}"


def measure_lookups(sizes: Sequence[int], rounds: int, step: Callable[[], None]) -> Iterator[Row]:
    """Yield rows of keys a second: present in the primary, and absent everywhere, for primaries of these sizes."""
    for rows in sizes:
        yield from _lookups(rows, rounds, step)


def _lookups(rows: int, rounds: int, step: Callable[[], None]) -> Iterator[Row]:
    with ExitStack() as stack:
        steps = Steps(rows, tiers=1)
        stack.callback(steps.close)
        steps.hold(0)
        present, absent = steps.new_keys(), steps.new_keys()
        steps.each(present, steps.store)
        bare = Bare(present)
        sides = [
            Side("hit", _rate(rows, lambda: steps.each(present, steps.look_up))),
            Side("miss", _rate(rows, lambda: steps.each(absent, steps.look_up))),
            Side("bare hit", _rate(rows, lambda: bare.look_up(present))),
            Side("bare miss", _rate(rows, lambda: bare.look_up(absent))),
        ]
        measured = interleaved(sides, rounds, step=step)
    for name in ("hit", "miss"):
        yield row_of(Pair(f"look up, {name}", None, {"keys": rows}, "keys/s", name, f"bare {name}", LIMIT_IS), measured)


def measure_steps(engines: Sequence[Engine], rounds: int, step: Callable[[], None]) -> Iterator[Row]:
    """Yield rows of keys a second for stores and loads, and of ms for whole steps of 64 requests with 32 keys each."""
    yield from _stores_and_loads(rounds, step)
    with ExitStack() as stack:
        sides = [_step_side(engine, stack) for engine in engines]
        sides.append(_bare_side())
        measured = interleaved(sides, rounds, step=step)
    for engine in engines:
        settings: dict[str, Setting] = {"tiers": engine.tiers, "keys_held": engine.held}
        yield row_of(Pair("step", None, settings, "ms", engine.label, "bare", LIMIT_IS), measured)
        if engine != engines[0]:
            limit_is = f"a step over {engines[0].tiers} tier with {engines[0].held:,} keys"
            yield row_of(Pair("step", None, settings, "ms", engine.label, engines[0].label, limit_is), measured)


def lookup_steps(sizes: Sequence[int], rounds: int) -> int:
    return len(sizes) * steps_of(4, rounds)


def step_steps(engines: Sequence[Engine], rounds: int) -> int:
    return steps_of(4, rounds) + steps_of(len(engines) + 1, rounds)


def _stores_and_loads(rounds: int, step: Callable[[], None]) -> Iterator[Row]:
    with ExitStack() as stack:
        storing, loading = Steps(), Steps()
        stack.callback(storing.close)
        stack.callback(loading.close)
        present, new = loading.new_keys(), Batches()
        storing.each(storing.new_keys(), storing.store)
        loading.each(present, loading.store)
        bare_store, bare_load = Bare(present), Bare(present)

        def refill() -> None:
            new[:] = storing.new_keys()

        sides = [
            Side("store", _rate(ROWS, lambda: storing.each(new, storing.store)), refill),
            Side("load", _rate(ROWS, lambda: loading.each(present, loading.load))),
            Side("bare store", _rate(ROWS, lambda: bare_store.store(new)), refill),
            Side("bare load", _rate(ROWS, lambda: bare_load.load(present))),
        ]
        measured = interleaved(sides, rounds, step=step)
    for name, operation in (("store", "prepare and complete a store"), ("load", "touch, prepare and complete a load")):
        yield row_of(Pair(operation, None, {"keys": ROWS}, "keys/s", name, f"bare {name}", LIMIT_IS), measured)


def _step_side(engine: Engine, stack: ExitStack) -> Side:
    steps = Steps(tiers=engine.tiers)
    stack.callback(steps.close)
    steps.hold(engine.held)
    steps.each(steps.new_keys(), steps.store)
    return _repeated(engine.label, steps.step, lambda: steps.new_keys(STEP_KEYS))


def _bare_side() -> Side:
    dice = random.Random(0)
    bare = Bare(Steps.random_keys(ROWS, dice))
    return _repeated("bare", bare.step, lambda: Steps.random_keys(STEP_KEYS, dice))


def _repeated(name: str, step: Callable[[Batches], None], new_keys: Callable[[], Batches]) -> Side:
    """Measure the ms that a step takes, on average over some with new keys."""
    new: list[Batches] = []

    def prepare() -> None:
        new[:] = [new_keys() for _ in range(STEPS_A_ROUND)]

    def measure() -> float:
        begun = time.thread_time()
        for batches in new:
            step(batches)
        return 1e3 * (time.thread_time() - begun) / STEPS_A_ROUND

    return Side(name, measure, prepare)


def _rate(keys: int, work: Callable[[], None]) -> Callable[[], float]:
    def measure() -> float:
        begun = time.thread_time()
        work()
        return keys / (time.thread_time() - begun)

    return measure


def main() -> None:
    """Print look-ups over primaries of several sizes, and steps over several tiers and numbers of held keys."""
    engines = [Engine(1, 10_000), Engine(2, 10_000), Engine(4, 10_000), Engine(1, 1_000_000)]
    sizes = [4_096, 65_536, 262_144]

    def work(step: Callable[[], None]) -> Iterator[Row]:
        yield from measure_lookups(sizes, ROUNDS, step)
        yield from measure_steps(engines, ROUNDS, step)

    run_bench("protocol", work, lookup_steps(sizes, ROUNDS) + step_steps(engines, ROUNDS), json_path=None)


if __name__ == "__main__":
    main()
