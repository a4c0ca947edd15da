"""The device under test: where KV caches are, the ways to copy that it has, and how it is told to take its time.

Checks are written once, for any device. On a CUDA device, work is launched on the current stream and done later. The
CPU does it at once. A check that needs work to be under way says that it cannot be made there.
"""

import logging
import shutil
import subprocess
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple, Protocol

import torch

from kvtier.errors import ConfigError
from kvtier.kvcache.transfer import CopiersOf
from kvtier.kvcache.transfer.cuda import BatchedCopy, batched_copy, copiers_with
from kvtier.kvcache.transfer.jobs import Copier
from kvtier.kvcache.transfer.pages import Sides
from kvtier.remedies import Remedy
from kvtier.tools.bench.copies import cuda_runtime

DEVICES = ("cpu", "cuda")
SPIN_CYCLES_PER_S = 2_000_000_000  # Of the fastest clocks there are: others spin longer.
QUERY_S = 20.0  # nvidia-smi answers in a second, or hangs with the driver.
PACKAGES = ("torch", "numpy", "cuda-bindings", "triton")


class NotHere(Exception):
    """A check cannot be made on this device; the reason is the message."""


class Wrong(Exception):
    """A promise was broken; the message says how."""


class Way(NamedTuple):
    """A way to copy between caches and rows; `copiers` is None for the one that a transfer worker chooses itself."""

    name: str
    copiers: CopiersOf | None


class Device(Protocol):
    """A device as checks need it."""

    name: str
    place: torch.device
    has_streams: bool  # Work is launched, and done later.

    ways: Sequence[Way]

    @property
    def pin_with(self) -> object | None:
        """What pins host memory for the device; None: nothing has to."""
        ...

    def launch(self, work: Callable[[], None]) -> None:
        """Have work done on the current stream."""
        ...

    def spin(self, seconds: float) -> None:
        """Have the current stream be busy for about so long; the CPU does nothing."""
        ...

    def mark(self) -> Callable[[], bool]:
        """Return what says whether all that was launched until now has been done."""
        ...

    def synchronize(self) -> None:
        """Wait until everything is done."""
        ...


class Cpu:
    """Tensors in host memory: what a dry run has."""

    name = "cpu"
    has_streams = False
    pin_with: object | None = None

    def __init__(self) -> None:
        torch.set_num_threads(
            1
        )  # More wait for each other, busily: on a busy machine a dry run took forty times as long.
        self.place = torch.device("cpu")
        self.ways: Sequence[Way] = (Way("by index", None),)

    def launch(self, work: Callable[[], None]) -> None:
        work()

    def spin(self, seconds: float) -> None:
        """Do nothing: what is launched here is done at once."""

    def mark(self) -> Callable[[], bool]:
        return lambda: True

    def synchronize(self) -> None:
        """Do nothing likewise."""


class Cuda:
    """The current CUDA device, with every way to copy that this machine has."""

    name = "cuda"
    has_streams = True

    def __init__(self) -> None:
        self.place = torch.device("cuda", torch.cuda.current_device())
        self.pin_with = cuda_runtime()
        self.ways: Sequence[Way] = cuda_ways(self.place)

    def launch(self, work: Callable[[], None]) -> None:
        work()

    def spin(self, seconds: float) -> None:
        torch.cuda._sleep(int(seconds * SPIN_CYCLES_PER_S))  # type: ignore[no-untyped-call]  # noqa: SLF001  # Nothing public does.

    def mark(self) -> Callable[[], bool]:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return event.query

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.place)


def cuda_ways(place: torch.device) -> tuple[Way, ...]:
    """Return the ways to copy that this machine has, that of a transfer worker first."""
    batches = batched_copy(place)
    found = list[Way]()
    if batches is not None:
        found.append(Way("batched", _copiers(place, batches)))
    found.append(Way("through a buffer", _copiers(place, None)))
    try:
        from kvtier.tools.selftest.gather import gathers_on  # Needs Triton, which not every torch brings.

        found.append(Way("gather kernel", _copiers(place, gathers_on(place))))
    except Exception as error:  # noqa: BLE001  # Triton needs a C compiler and Python's headers, and says so as it likes.
        logging.getLogger(__name__).warning(
            "The gather kernel is not tested: %s: %s; see %s", type(error).__name__, error, Remedy.UNGATHERED
        )
    return tuple(found)


def _copiers(place: torch.device, copy: BatchedCopy | None) -> CopiersOf:
    def made(sides: Sides) -> Sequence[Copier]:
        return copiers_with(sides, place, copy)

    return made


def device_named(name: str) -> Device:
    """Return a device; `ConfigError` if torch does not find it here."""
    if name == "cpu":
        return Cpu()
    if name not in DEVICES:
        raise ConfigError(f"--device {name!r}: expected one of {', '.join(DEVICES)}")
    if not torch.cuda.is_available():
        raise ConfigError(f"--device cuda: torch {torch.__version__} finds no such device; cpu accepted, for a dry run")
    return Cuda()


def facts(device: Device) -> dict[str, str]:
    """Return what figures of this device depend on: its name, driver, link and versions."""
    found = {"device": device.name}
    if device.name == "cuda":
        cuda: Any = torch.cuda
        properties = cuda.get_device_properties(device.place)
        found["name"] = str(properties.name)
        found["memory_bytes"] = str(properties.total_memory)
        found["cuda"] = str(torch.version.cuda)
        asked = {
            "driver": "driver_version",
            "pcie_generation": "pcie.link.gen.max",
            "pcie_lanes": "pcie.link.width.max",
        }
        found |= dict(zip(asked, _nvidia_smi(list(asked.values()), device.place.index or 0), strict=True))
    return found | {package: _version(package) for package in PACKAGES}


def _nvidia_smi(fields: list[str], index: int) -> list[str]:
    path = shutil.which("nvidia-smi")
    if path is None:
        return ["unknown"] * len(fields)
    command = [path, f"--query-gpu={','.join(fields)}", "--format=csv,noheader", f"--id={index}"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=QUERY_S, check=True).stdout  # noqa: S603  # Our own arguments.
    except (OSError, subprocess.SubprocessError):
        return ["unknown"] * len(fields)
    answers = [part.strip() for part in told.strip().split(",")]
    return answers if len(answers) == len(fields) else ["unknown"] * len(fields)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"
