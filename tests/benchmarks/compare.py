"""The costs of hot functions beside the stored baseline; exit status 1 if one costs more.

    .venv/bin/python -m tests.benchmarks.compare [--write] [NAME …]

Valgrind counts instructions: they do not depend on who else uses the machine, and two runs agree to less than a
percent. A cost is a multiple of the calibration, plain Python counted in the same run, so that one baseline does for
all machines. Exit status 1 if a case costs more than `TOLERANCE` above its baseline, 2 if there is no baseline for this
Python. --write stores a new baseline: do it with the change that explains it.
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
from pathlib import Path

from tests.benchmarks.hot import CALIBRATION, CASES

BASELINE = Path(__file__).parent / "baseline.json"
TOLERANCE = 0.05  # Two runs differ by less than 1 %, two builds of one Python by some percent.
WARM_UP = 3  # Calls that are not counted: Python specialises what it runs often.
COUNTED = 3  # Calls; the median of them.
EXIT_SLOWER, EXIT_NO_BASELINE = 1, 2


def mark():
    """Begin another part of valgrind's profile: a call that nothing else makes, which it is told to look for."""
    os.getpriority(os.PRIO_PROCESS, 0)


def run_marked(names):
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


def instructions(names, valgrind):
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


def multiples(costs):
    unit = costs[CALIBRATION] / CASES[CALIBRATION].operations
    return {name: cost / CASES[name].operations / unit for name, cost in costs.items()}


def report(costs, baseline):
    slower = 0
    for name, cost in costs.items():
        if name == CALIBRATION:
            continue
        change = cost / baseline.get(name, cost) - 1
        slower += change > TOLERANCE
        before = f"{baseline[name]:10.3f} {change:+8.1%}" if name in baseline else "no baseline"
        print(f"{name:40} {cost:10.3f} {before}{'  SLOWER' if change > TOLERANCE else ''}")
    print(f"{len(costs) - 1} cases, {slower} cost more than {TOLERANCE:.0%} above their baseline")
    return not slower


def _total(part):
    for line in part.read_text().splitlines():
        if line.startswith("totals:"):
            return float(line.split()[1])
    raise SystemExit(f"{part.name} has no total: this valgrind writes another format")


def stored(version):
    return json.loads(BASELINE.read_text()).get("instructions", {}).get(version)


def store(version, costs):
    whole = json.loads(BASELINE.read_text())
    rounded = {name: round(cost, 4) for name, cost in costs.items() if name != CALIBRATION}
    whole["instructions"][version] = dict(sorted({**(stored(version) or {}), **rounded}.items()))
    BASELINE.write_text(json.dumps(whole, indent=1, sort_keys=True) + "\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="Cases; all of them by default.")
    parser.add_argument("--write", action="store_true", help="Store the counts as the baseline.")
    parser.add_argument("--marked", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.marked:
        run_marked(given.names)
        return 0
    valgrind, version = shutil.which("valgrind"), f"{sys.version_info.major}.{sys.version_info.minor}"
    names = [CALIBRATION, *(name for name in given.names or CASES if name != CALIBRATION)]
    if valgrind is None or set(names) - set(CASES):
        raise SystemExit(f"no such case: {set(names) - set(CASES)}" if valgrind else "valgrind is not installed")
    costs = multiples(instructions(names, valgrind))
    if given.write:
        store(version, costs)
        print(f"{len(costs) - 1} cases stored in {BASELINE} (Python {version})")
        return 0
    baseline = stored(version)
    if baseline is None:
        print(f"{BASELINE} has nothing for Python {version}: store it with --write")
        return EXIT_NO_BASELINE
    print(f"instructions, as multiples of the calibration's; Python {version}")
    return 0 if report(costs, baseline) else EXIT_SLOWER


if __name__ == "__main__":
    sys.exit(main())
