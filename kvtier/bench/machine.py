"""What a figure was measured on: the facts that a reader needs to make sense of it, and how busy the machine was."""

import os
import platform
from collections.abc import Iterable

import msgspec

from kvtier import __version__

Load = tuple[float, float, float]


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """Where figures come from. Loads are the kernel's averages over 1, 5 and 15 minutes."""

    processor: str
    processors: int  # That this process may use.
    memory_bytes: int
    kernel: str
    python: str
    kvtier: str
    file_system: str | None  # Of the directory that was measured, as mounted.
    load_before: Load
    load_after: Load


def load() -> Load:
    """Return how many processes wanted a processor, on average over the last 1, 5 and 15 minutes."""
    return os.getloadavg()


def this_machine(load_before: Load, directory: str | None = None) -> Machine:
    """Describe this machine at the end of a run that began under `load_before`."""
    return Machine(
        processor=_processor(),
        processors=len(os.sched_getaffinity(0)),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        kernel=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
        kvtier=__version__,
        file_system=None if directory is None else _file_system(directory),
        load_before=load_before,
        load_after=load(),
    )


def _processor() -> str:
    with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
        names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _file_system(directory: str) -> str:
    """Return `<type> on <device>`: the mount that is nearest above the directory."""
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as lines:
        return mounted_at(os.path.realpath(directory), lines)


def mounted_at(path: str, mountinfo: Iterable[str]) -> str:
    """Find a path's mount among the lines of /proc/self/mountinfo: proc(5) has their fields."""
    nearest, found = -1, "unknown"
    for line in mountinfo:
        before, _, after = line.partition(" - ")
        point = before.split()[4].encode().decode("unicode_escape")  # Spaces are written \040.
        inside = path == point or path.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= nearest:
            kind, device = after.split()[:2]
            nearest, found = len(point), f"{kind} on {device}"
    return found
