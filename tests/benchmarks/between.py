"""The instructions of the step protocol at another commit, and here: what a change costs who does not use it.

    .venv/bin/python -m tests.benchmarks.between COMMIT [--keys 24,234]

A request is looked up, loaded as far as it is there, stored as far as it is not, and ends; then its step ends. There is
no hint, no load is weighed, the policy is LRU, and the runner has done everything by the time it is asked. Both commits
run the same calls under valgrind, which counts instructions: they do not depend on who else uses the machine.
"""

import argparse
import gc
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from itertools import product
from pathlib import Path

from kvtier.backend import OffloadKey, make_offload_key
from kvtier.config import EngineConfig, EngineLimits, TierConfig, TierLimits
from kvtier.engine.answers import LookupResult
from kvtier.engine.steps import StepManager
from kvtier.memory import Region
from kvtier.runner.bridge import Bridge
from kvtier.runner.messages import Action, Cascade, Finished, Found, Gone, Scanned, pack_keys

CHUNK_BYTES = 4_096
REQUESTS_HELD = 64  # By the primary.
REQUESTS_COUNTED = 16
WARM_UP = 5  # Calls that are not counted: Python specialises what it runs often.
COUNTED = 3
TIER_HOLDS = REQUESTS_HELD // 2  # Requests: what was stored first goes.
CASES = ("hit", "miss", "half", "miss, one tier", "half, one tier")


class Echo(Bridge):
    """A runner that has done everything by the time it is asked, over a tier that holds little."""

    kind = "echo"

    def __init__(self) -> None:
        super().__init__()
        self._held: list[bytes] = []  # Packed keys, by action.

    def send(self, actions: Sequence[Action]) -> Sequence[Action]:
        for action in actions:
            if isinstance(action, Cascade):
                self.mailbox.append(Finished(action.id, b"", b"", 0.0))
                self._held.append(action.keys)
                if len(self._held) > TIER_HOLDS:
                    self.mailbox.append(Gone(0, self._held.pop(0)))
        return ()

    def close(self, deadline_s: float) -> int:  # Nothing is under way.
        return 0


class Requests:
    """Requests of so many keys through the step protocol; those of one case are all alike."""

    def __init__(self, case: str, keys: int) -> None:
        rows = REQUESTS_HELD * keys
        limits = TierLimits(store_chunks_in_flight=rows, store_bytes_in_flight=rows * CHUNK_BYTES)
        config = EngineConfig(
            cpu_bytes_to_use=rows * CHUNK_BYTES,
            chunk_bytes=CHUNK_BYTES,
            secondary_tiers=(TierConfig(type="dummy", limits=limits),) if "tier" in case else (),
            limits=EngineLimits(cascade_share=1.0),
        )
        bridge = Echo()
        self._engine = StepManager(config, Region.private(rows, CHUNK_BYTES, prefault=False), bridge, clock=lambda: 0.0)
        for tier in range(len(config.secondary_tiers)):
            bridge.mailbox += [Found(tier, pack_keys([])), Scanned(tier, complete=True)]
        self._known_keys = {"hit": keys, "half": keys // 2}.get(case.split(",")[0], 0)
        self._keys = keys
        self._dice = random.Random(7)
        self._numbers = 0
        self._known = [self._new(self._known_keys) for _ in range(REQUESTS_COUNTED)]
        for known in self._known:
            self._serve(known)

    def work(self) -> None:
        """Serve the same prefixes again, each with a tail that is new."""
        for known in self._known:
            self._serve(known + self._new(self._keys - self._known_keys))

    def _new(self, count: int) -> list[OffloadKey]:
        return [make_offload_key(self._dice.randbytes(32)) for _ in range(count)]

    def _serve(self, keys: list[OffloadKey]) -> None:
        engine, hits = self._engine, 0
        self._numbers += 1
        name = str(self._numbers)
        engine.on_new_request(name)
        for key in keys:
            if engine.lookup(key, name) is not LookupResult.HIT:
                break
            hits += 1
        engine.prepare_load(keys[:hits], name)
        engine.complete_load(keys[:hits], name)
        plan = engine.prepare_store(keys, name)
        assert plan is not None
        engine.complete_store(plan.keys, name)
        engine.on_request_finished(name)
        engine.end_step()


def mark() -> None:
    """Begin another part of valgrind's profile: a call that nothing else makes, which it is told to look for."""
    os.getpriority(os.PRIO_PROCESS, 0)


def run_marked(sizes: Sequence[int]) -> None:
    """Run all cases with a mark before and after what counts."""
    for keys, case in product(sizes, CASES):
        work = Requests(case, keys).work
        for _ in range(WARM_UP):
            work()
        for _ in range(COUNTED):
            gc.collect()  # Or what the cases before have left decides how often the collector runs in this one.
            mark()
            work()
            mark()


def instructions(tree: Path, sizes: str) -> list[float]:
    """Return the instructions of one request of each case, with the sources of this tree."""
    with tempfile.TemporaryDirectory() as folder:
        out = f"{folder}/callgrind"
        valgrind = ["valgrind", "--tool=callgrind", "--dump-before=getpriority", f"--callgrind-out-file={out}"]
        command = [*valgrind, sys.executable, __file__, "--marked", "--keys", sizes]
        path = os.pathsep.join((str(tree), str(tree / "backends")))
        environment = {**os.environ, "PYTHONHASHSEED": "0", "PYTHONPATH": path}
        subprocess.run(command, env=environment, check=True, capture_output=True)
        cases = len(sizes.split(",")) * len(CASES)
        counts = [_total(Path(f"{out}.{part}")) for part in range(2, 2 + 2 * COUNTED * cases, 2)]
    return [statistics.median(part) / REQUESTS_COUNTED for part in zip(*[iter(counts)] * COUNTED, strict=True)]


def _total(part: Path) -> int:
    return next(int(line.split()[1]) for line in part.read_text().splitlines() if line.startswith("totals:"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit", nargs="?")
    parser.add_argument("--keys", default="24,234")
    parser.add_argument("--marked", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.marked:
        run_marked(list(map(int, given.keys.split(","))))
        return
    if not given.commit:
        parser.error("a commit to compare with")
    here = Path(__file__).parents[2]
    with tempfile.TemporaryDirectory() as folder:
        before = Path(folder, "before")
        git = ["git", "-C", str(here), "worktree"]
        subprocess.run([*git, "add", "--detach", str(before), given.commit], check=True, capture_output=True)
        try:
            counts = zip(instructions(before, given.keys), instructions(here, given.keys), strict=True)
            for (keys, case), (then, now) in zip(product(given.keys.split(","), CASES), counts, strict=True):
                print(f"{keys:>4} keys, {case:15} {then:12,.0f} {now:12,.0f} {now / then - 1:+8.1%}")
        finally:
            subprocess.run([*git, "remove", "--force", str(before)], check=True)


if __name__ == "__main__":
    main()
