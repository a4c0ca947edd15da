"""The costs of hot functions beside the stored baseline; exit status 1 if one costs more.

    .venv/bin/python -m tests.benchmarks.compare [--write] [--times] [NAME …]

Everything is a multiple of the calibration, plain Python measured in the same run, so that one baseline does for all
machines. Where valgrind is installed instructions are counted: they do not depend on who else uses the machine, and two
runs agree to less than a percent. Without it (or with --times) times are measured, in turn, which agree to a third at
best. `TOLERANCE` is what a case may cost more than its baseline.

Exit status 1 if a case costs more than that, 2 if there is no baseline for this Python. --write stores a new baseline:
do it with the change that explains it.
"""

import argparse
import gc
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.benchmarks.hot import CALIBRATION, CASES, TIMED_ONLY, Work

BASELINE = Path(__file__).parent / "baseline.json"
TOLERANCE = {
    "instructions": 0.05,  # Two runs differ by less than 1 %, two builds of one Python by some percent.
    "times": 0.5,  # Neighbours, clocks and caches: what is worse than that is no accident.
}
WARM_UP = 3  # Calls that are not counted: Python specialises what it runs often.
COUNTED = 3  # Calls; the median of them.
ROUNDS = 15
EXIT_SLOWER, EXIT_NO_BASELINE = 1, 2


class Verdict(NamedTuple):
    """A case's cost, as multiples of the calibration."""

    name: str
    cost: float
    baseline: float | None

    @property
    def change(self) -> float:
        return 0.0 if self.baseline is None else self.cost / self.baseline - 1


def mark() -> None:
    """Begin another part of valgrind's profile: a call that nothing else makes, which it is told to look for."""
    os.getpriority(os.PRIO_PROCESS, 0)


def run_marked(names: Sequence[str]) -> None:
    """Run cases with a mark before and after what counts. Only makes sense under valgrind."""
    for name in names:
        work = CASES[name].make()
        for _ in range(WARM_UP):
            work()
        for _ in range(COUNTED):
            gc.collect()  # Or what the cases before have left decides how often the collector runs in this one.
            mark()
            work()
            mark()


def instructions(names: Sequence[str], valgrind: str) -> dict[str, float]:
    """Count the instructions of one call of each case."""
    with tempfile.TemporaryDirectory() as folder:
        out = f"{folder}/callgrind"
        command = [
            valgrind,
            "--tool=callgrind",
            "--dump-before=getpriority",
            f"--callgrind-out-file={out}",
            sys.executable,
            "-m",
            "tests.benchmarks.compare",
            "--marked",
            *names,
        ]
        environment = {**os.environ, "PYTHONHASHSEED": "0"}  # Or dictionaries would collide elsewhere in each run.
        ran = subprocess.run(command, env=environment, capture_output=True, text=True)
        if ran.returncode:
            raise SystemExit(f"valgrind ended with status {ran.returncode}:\n{ran.stderr[-2_000:]}")
        parts = [_total(Path(f"{out}.{number}")) for number in range(1, 1 + 2 * COUNTED * len(names))]
    # Parts are cut at the marks: before a case's first call, its calls, and what lies between them.
    calls = parts[1::2]
    return {
        name: statistics.median(calls[start : start + COUNTED])
        for name, start in zip(names, range(0, len(calls), COUNTED), strict=True)
    }


def times(names: Sequence[str]) -> dict[str, float]:
    """Measure the seconds of one call of each case, in turn."""
    works = {name: CASES[name].make() for name in names}
    taken: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(WARM_UP + ROUNDS):
        for name, work in works.items():
            taken[name].append(_seconds(work))
    return {name: min(each[WARM_UP:]) for name, each in taken.items()}


def multiples(costs: dict[str, float]) -> dict[str, float]:
    """Return what one operation costs, as multiples of one operation of the calibration."""
    unit = costs[CALIBRATION] / CASES[CALIBRATION].operations
    return {name: cost / CASES[name].operations / unit for name, cost in costs.items()}


def verdicts(costs: dict[str, float], baseline: dict[str, float]) -> Iterator[Verdict]:
    for name, cost in costs.items():
        if name != CALIBRATION:
            yield Verdict(name, cost, baseline.get(name))


def report(found: Sequence[Verdict], tolerance: float) -> bool:
    """Print the verdicts; say whether none costs more than it may."""
    width = max(len(verdict.name) for verdict in found)
    slower = [verdict for verdict in found if verdict.change > tolerance]
    for verdict in found:
        before = "no baseline" if verdict.baseline is None else f"{verdict.baseline:10.3f} {verdict.change:+8.1%}"
        mark_ = "  SLOWER" if verdict in slower else ""
        print(f"{verdict.name:{width}} {verdict.cost:10.3f} {before}{mark_}")
    print(f"{len(found)} cases, {len(slower)} cost more than {tolerance:.0%} above their baseline")
    return not slower


def _seconds(work: Work) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def _total(part: Path) -> float:
    for line in part.read_text().splitlines():
        if line.startswith("totals:"):
            return float(line.split()[1])
    raise SystemExit(f"{part.name} has no total: this valgrind writes another format")


def stored(kind: str, version: str, path: Path) -> dict[str, float] | None:
    if not path.exists():
        return None
    found: dict[str, Any] = json.loads(path.read_text())
    return found.get(kind, {}).get(version)


def store(kind: str, version: str, costs: dict[str, float], path: Path) -> None:
    whole: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    rounded = {name: round(cost, 4) for name, cost in costs.items() if name != CALIBRATION}
    known = whole.setdefault(kind, {}).get(version, {})
    whole[kind][version] = dict(sorted({**known, **rounded}.items()))
    path.write_text(json.dumps(whole, indent=1, sort_keys=True) + "\n")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="Cases; all of them by default.")
    parser.add_argument("--write", action="store_true", help="Store what was found as the baseline.")
    parser.add_argument("--times", action="store_true", help="Measure times even if valgrind is installed.")
    parser.add_argument("--baseline", type=Path, default=BASELINE)
    parser.add_argument("--marked", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.marked:
        run_marked(given.names)
        return 0
    valgrind = None if given.times else shutil.which("valgrind")
    kind, version = "instructions" if valgrind else "times", f"{sys.version_info.major}.{sys.version_info.minor}"
    chosen = given.names or [name for name in CASES if not (valgrind and name in TIMED_ONLY)]
    names = [CALIBRATION, *(name for name in chosen if name != CALIBRATION)]
    if unknown := set(names) - set(CASES):
        raise SystemExit(f"no such case: {', '.join(sorted(unknown))}")
    costs = multiples(instructions(names, valgrind) if valgrind else times(names))
    if given.write:
        store(kind, version, costs, given.baseline)
        print(f"{len(costs) - 1} cases stored in {given.baseline} ({kind}, Python {version})")
        return 0
    baseline = stored(kind, version, given.baseline)
    if baseline is None:
        print(f"{given.baseline} has no {kind} for Python {version}: store them with --write")
        return EXIT_NO_BASELINE
    print(f"{kind}, as multiples of the calibration's; Python {version}")
    return 0 if report(list(verdicts(costs, baseline)), TOLERANCE[kind]) else EXIT_SLOWER


if __name__ == "__main__":
    sys.exit(main())
