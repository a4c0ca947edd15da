"""The step protocol on one core: look-ups, stores, loads, and whole steps over more tiers and larger indexes.

What is measured is the CPU time of the owner's thread: neighbours do not count. The limit is what a loop in Python
takes for as many bare dictionary operations: no engine that keeps its keys in one can be faster. A step is also
compared with the same step over one tier that holds little: what it costs must not depend on how much tiers hold.

The engine has no I/O: the runner behind it answers at once that all was done, so that outcomes are applied, too.

    python -m tests.benchmarks.protocol lookup
    python -m tests.benchmarks.protocol steps --tiers 1,4 --held 10000,1000000
"""

import random
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Annotated, NamedTuple

import typer

from kvtier.backend import OffloadKey, make_offload_key
from kvtier.config import EngineConfig, EngineLimits, TierConfig, TierLimits
from kvtier.engine.steps import StepManager
from kvtier.errors import ConfigError
from kvtier.memory import Region
from kvtier.runner.bridge import Bridge
from kvtier.runner.messages import Action, Cascade, Delete, Finished, Found, Promote, Scanned, pack_keys
from kvtier.tools.bench.commands import (
    DEFAULT_ROUNDS,
    RoundsOption,
    numbers,
    run_bench,
)
from kvtier.tools.bench.figures import Pair, Row, Setting, Side, interleaved, row_of, steps_of
from kvtier.tools.options import JsonOption, PlotOption
from kvtier.tools.outputs import check_outputs

ROWS = 65_536
KEYS_A_REQUEST = 32
REQUESTS_A_STEP = 64
CHUNK_BYTES = 4_096
KEYS_MAX = 10_000_000  # Some gigabytes of memory: each is a key in several tables.
REPORT_KEYS = 4_096  # As a tier reports what it holds.


class Echo(Bridge):
    """A runner that has done everything by the time it is asked."""

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
        self.region = Region.private(rows, CHUNK_BYTES, prefault=False)
        self.bridge = Echo()
        self.manager = StepManager(config, self.region, self.bridge)
        self._random = random.Random(seed)
        self._requests = 0

    def hold(self, keys: int) -> None:
        """Have every tier hold so many keys that nobody will ask for, and say that it has no others."""
        for tier in range(len(self.manager.config.secondary_tiers)):
            for start in range(0, keys, REPORT_KEYS):
                named = [index.to_bytes(32, "big") for index in range(start, min(start + REPORT_KEYS, keys))]
                self.bridge.mailbox.append(Found(tier, pack_keys([make_offload_key(name) for name in named])))
                self.manager.end_step()
            self.bridge.mailbox.append(Scanned(tier, complete=True))
            self.manager.end_step()

    def new_keys(self, count: int | None = None) -> list[list[OffloadKey]]:
        """Return the keys of as many requests as fill the primary, or of so many keys."""
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
    """The dictionary operations that cannot be avoided for as many keys."""

    def __init__(self, batches: Batches) -> None:
        self.table = OrderedDict((key, 0) for keys in batches for key in keys)

    def look_up(self, batches: Batches) -> None:
        get = self.table.get
        for keys in batches:
            for key in keys:
                get(key)

    def store(self, batches: Batches) -> None:
        """Put keys in, and as many of the oldest out."""
        table, go = self.table, self.table.popitem
        for keys in batches:
            for key in keys:
                table[key] = 0
                go(last=False)

    def load(self, batches: Batches) -> None:
        """Find keys, make them the newest, and find them again."""
        renew, get = self.table.move_to_end, self.table.get
        for keys in batches:
            for key in keys:
                renew(key)
                get(key)

    def step(self, batches: Batches) -> None:
        """Look keys up, put them in, and have as many of the oldest out."""
        self.look_up(batches)
        self.store(batches)


class Engine(NamedTuple):
    """Tiers, and how many keys each of them holds beside those that the steps store."""

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


def lookup(
    keys: Annotated[
        str, typer.Option(help="Sizes of the primary, in chunks, with commas between them.")
    ] = "4096,65536,262144",
    rounds: RoundsOption = DEFAULT_ROUNDS,
    json_path: JsonOption = None,
    plot_path: PlotOption = None,
) -> None:
    """Measure look-ups in the primary, beside as many in a bare dictionary."""
    found = numbers("--keys", keys, least=1_024, most=KEYS_MAX)
    check_outputs(json_path, plot_path)
    run_bench(
        "tests.benchmarks.protocol lookup",
        lambda step: measure_lookups(found, rounds, step),
        lookup_steps(found, rounds),
        json_path=json_path,
        plot_path=plot_path,
    )


def steps(
    tiers: Annotated[str, typer.Option(help="Numbers of tiers, with commas between them.")] = "1,2,4",
    held: Annotated[
        str, typer.Option(help="Keys that each tier holds beside those of the steps, with commas between them.")
    ] = "10000,1000000",
    rounds: RoundsOption = DEFAULT_ROUNDS,
    json_path: JsonOption = None,
    plot_path: PlotOption = None,
) -> None:
    """Measure the step protocol: stores, loads, and whole steps of 64 requests with 32 keys each, without I/O.

    Each step looks its keys up, prepares and completes their stores, and cascades them to every tier.
    """
    sizes_held = numbers("--held", held, least=0, most=KEYS_MAX)
    counts = numbers("--tiers", tiers, least=1, most=16)
    engines = [Engine(count, sizes_held[0]) for count in counts] + [Engine(counts[0], each) for each in sizes_held[1:]]
    if (kept := sum(engine.tiers * engine.held for engine in engines)) > KEYS_MAX:
        raise ConfigError(f"--held {held!r}: {kept:,} keys in all tiers together, at most {KEYS_MAX:,} accepted")
    check_outputs(json_path, plot_path)
    run_bench(
        "tests.benchmarks.protocol steps",
        lambda step: measure_steps(engines, rounds, step),
        step_steps(engines, rounds),
        json_path=json_path,
        plot_path=plot_path,
    )


if __name__ == "__main__":
    app = typer.Typer(add_completion=False)
    app.command()(lookup)
    app.command()(steps)
    app()
