"""How long `import kvtier` and `kvtier --help` take, beside an interpreter that does nothing.

    .venv/bin/python tests/benchmarks/start.py [ROUNDS]

Processes of the same interpreter, in turn; prints the medians of their CPU time, which neighbours on a busy machine do
not add to, and how many times as long as `python -c pass` they take.
"""

import os
import statistics
import subprocess
import sys

from kvtier.tools.figures import Side, interleaved

COMMANDS = {
    "python -c pass": ["-c", "pass"],
    "import kvtier": ["-c", "import kvtier"],
    "kvtier --help": ["-c", "from kvtier.tools.cli import main; main()", "--help"],
}
ROUNDS = 15


def measure(arguments):
    with subprocess.Popen([sys.executable, *arguments], stdout=subprocess.DEVNULL) as process:
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, arguments
    return 1e3 * (usage.ru_utime + usage.ru_stime)


def main(rounds=ROUNDS):
    before = os.getloadavg()
    measured = interleaved(
        [Side(name, lambda arguments=arguments: measure(arguments)) for name, arguments in COMMANDS.items()], rounds
    )
    bare = measured["python -c pass"]
    for name, times in measured.items():
        ratios = [time / least for time, least in zip(times, bare, strict=True)]
        spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
        print(f"{name:16} {statistics.median(times):7.1f} ms  {statistics.median(ratios):5.2f} times  ({spread})")
    print(f"{rounds} rounds; load of the machine {before[0]:.2f} before, {os.getloadavg()[0]:.2f} after")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
