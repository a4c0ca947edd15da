"""The same disk as fio sees it, where fio is installed: a limit that is not ours, with a queue instead of threads."""

import json
import os
import shutil
import subprocess
from typing import Any, Literal

RUNTIME_S = 1.0  # A round: what the others take.

Way = Literal["read", "write"]


def fio_path() -> str | None:
    """Return where fio is; None if it is not installed."""
    return shutil.which("fio")


class Fio:
    """Runs of fio over one file of its own in a directory, which the first run lays out."""

    def __init__(self, path: str, directory: str, *, size_bytes: int, direct: bool) -> None:
        self._path = path
        self._file = os.path.join(directory, "fio")
        self._size_bytes = size_bytes
        self._direct = direct

    def rate(self, way: Way, chunk_bytes: int, depth: int) -> float:
        """Read or write chunks at random places for a second, with so many under way; return the bytes a second."""
        ran = subprocess.run(  # noqa: S603  # The program that the user has installed.
            [*self._command(), f"--rw=rand{way}", f"--bs={chunk_bytes}", f"--iodepth={depth}"],
            capture_output=True,
            text=True,
            check=False,
        )
        if ran.returncode:
            raise OSError(None, f"fio ended with status {ran.returncode}: {ran.stderr.strip()[:200]}")
        return rate_in(ran.stdout, way)

    def _command(self) -> list[str]:
        return [
            self._path,
            "--name=kvtier",
            f"--filename={self._file}",
            f"--size={self._size_bytes}",
            f"--direct={int(self._direct)}",
            "--ioengine=libaio" if self._direct else "--ioengine=psync",
            "--time_based",
            f"--runtime={RUNTIME_S:g}",
            "--output-format=json",
        ]


def rate_in(report: str, way: Way) -> float:
    """Return the bytes a second that fio's JSON report tells; what stands before it (warnings) is skipped."""
    told: dict[str, Any] = json.loads(report[report.index("{") :])
    (job,) = told["jobs"]
    return float(job[way]["bw_bytes"])
