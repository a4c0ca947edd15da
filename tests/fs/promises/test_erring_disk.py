"""Never more on a disk that errs than the capacity says, at any moment; and when it is well again, all is as before.

`KVTIER_ERRING_S` sets how long the disk errs, `KVTIER_ERRING_SEED` how.
"""

import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.fs.conftest import FaultyDisk, _taken_bytes

logger = logging.getLogger(__name__)

ERRING_S = float(os.environ.get("KVTIER_ERRING_S", "2"))
SEED = int(os.environ.get("KVTIER_ERRING_SEED", "1"))
CAPACITY_BYTES = 2 << 20
ROW_BYTES = 8_192
KEYS = 500  # Three times what there is room for.
DEADLINE_S = 60.0
LOOK_S = 0.01
SLACK_BYTES = 64 << 10  # Segments count as fragmented, and a checkpoint may be half written.

ERRORS = ["EIO", "EBUSY", "EMFILE", "ENOENT", "ENOSPC", "EAGAIN"]
FILES: dict[str, Any] = {"layout": "files"}
SEGMENTS: dict[str, Any] = {"layout": "segments"}


class Engine:
    """A process with a tier."""

    def __init__(self, root: Path, seed: int, options: dict[str, Any]) -> None:
        given = {"root": str(root), "capacity_bytes": CAPACITY_BYTES, **options}
        asked = {"row_bytes": ROW_BYTES, "keys": KEYS, "seed": seed, "options": given}
        command = [sys.executable, str(Path(__file__).parents[1] / "storm_writer.py"), json.dumps(asked)]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
        self.heard()

    def tell(self, word: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{word}\n")
        self._process.stdin.flush()

    def heard(self) -> int:
        assert self._process.stdout is not None
        line = self._process.stdout.readline().split()
        assert line, "the engine ended"
        return int(line[-1]) if len(line) > 1 else 0

    def ask(self, word: str) -> int:
        self.tell(word)
        return self.heard()

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()


def all_do(engines: list[Engine], word: str) -> list[int]:
    for engine in engines:
        engine.tell(word)
    return [engine.heard() for engine in engines]


class Looks:
    """What lies below a folder, looked at all the time."""

    def __init__(self, folder: Path) -> None:
        self.most = self.count = 0
        self._folder = folder
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._ended.wait(LOOK_S):
            self.most = max(self.most, _taken_bytes(self._folder))
            self.count += 1

    @contextmanager
    def looking(self) -> Iterator[None]:
        self._thread.start()
        try:
            yield
        finally:
            self._ended.set()
            self._thread.join()


@pytest.mark.usefixtures("thorough")
@pytest.mark.parametrize("percent", [20, 50])
@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize(
    ("options", "count"),
    [(FILES, 1), (SEGMENTS, 1), ({"shared": True, **FILES}, 2), ({"shared": True, **FILES}, 4)],
    ids=["files", "segments", "two", "four"],
)
def test_a_disk_that_errs_holds_no_more_than_the_capacity_and_is_as_before_when_it_is_well(
    disk: FaultyDisk, tmp_path: Path, options: dict[str, Any], count: int, error: str, percent: int
) -> None:
    behind = tmp_path / "behind" / "tier"
    engines = [Engine(disk.path / "tier", SEED + number, options) for number in range(count)]
    looks = Looks(behind)
    try:
        with looks.looking():
            all_do(engines, "work")
            until(lambda: _taken_bytes(behind) > CAPACITY_BYTES * 0.4)
            disk.tell(f"{error} {percent} {SEED}")
            time.sleep(ERRING_S / 2)  # Not to wait for anything: for so long it errs.
            all_do(engines, "rest")
            all_do(engines, "work")
            time.sleep(ERRING_S / 2)
            disk.tell("well")
            all_do(engines, "rest")
            until(lambda: not temporaries(behind))
            until(lambda: is_true(all_do(engines, "used"), _taken_bytes(behind)))
            until(lambda: all_do(engines, "store") == [4] * count)
        logger.info("%.3f of the capacity at most, in %d looks", looks.most / CAPACITY_BYTES, looks.count)
        assert looks.most <= CAPACITY_BYTES
    finally:
        for engine in engines:
            engine.end()


def is_true(used: list[int], taken_bytes: int) -> bool:
    return all(taken_bytes <= said <= taken_bytes + SLACK_BYTES for said in used)


def temporaries(folder: Path) -> list[str]:
    return [name for _, _, files in os.walk(folder) for name in files if name.endswith(".tmp")]


def until(true: Callable[[], bool]) -> None:
    ends_at = time.monotonic() + DEADLINE_S
    while not true():  # A disk tells nobody that a file is gone.
        assert time.monotonic() < ends_at
        time.sleep(0.05)
