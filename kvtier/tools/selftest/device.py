"""The device under test: the CPU, which does work at once, or a CUDA device, which does it later, on its stream."""

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from kvtier.errors import ConfigError
from kvtier.kvcache.transfer import CopiersOf
from kvtier.kvcache.transfer.cuda import batched_copy, copiers_with

SPIN_CYCLES = 400_000_000  # A fifth of a second at 2 GHz: longer than a busy machine takes to submit a transfer.

host: Any = import_module("kvtier_backends.cpu")  # By name: tools know no tier.


class NotHere(Exception):
    """A check cannot be made on this device; the reason is the message."""


class Wrong(Exception):
    """A promise was broken; the message says how."""


class TorchDevice:
    """The place of the KV caches, and the copies that transfers use there."""

    def __init__(self, name: str) -> None:
        """Raise `ConfigError` if torch does not find the device here."""
        if name not in ("cpu", "cuda"):
            raise ConfigError(f"--device {name!r}: expected one of cpu, cuda")
        if name == "cuda" and not torch.cuda.is_available():
            raise ConfigError(f"--device cuda: torch {torch.__version__} finds none; cpu accepted, for a dry run")
        self.name, self.has_streams = name, name == "cuda"
        self.place = torch.device(name)
        self.pin_with: object | None = None
        self.copiers: CopiersOf | None = None  # None: the transfer worker's own choice.
        self.way = "by index"
        if self.has_streams:
            self.place = torch.device(name, torch.cuda.current_device())
            self.pin_with = host.cuda_runtime()
            batches = batched_copy(self.place)  # Once, so that the log has one warning if there are none.
            self.copiers = partial(copiers_with, device=self.place, copy=batches)
            self.way = "one by one" if batches is None else "batched"
        else:
            torch.set_num_threads(1)  # Several spin while they wait for each other: forty times as slow on a busy CPU.

    def launch_late(self, work: Callable[[], object]) -> Callable[[], bool]:
        """Launch work behind a kernel that spins; the result returns True until the work is done."""
        self.synchronize()
        torch.cuda._sleep(SPIN_CYCLES)  # type: ignore[no-untyped-call]  # noqa: SLF001  # No public call spins.
        work()
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record()
        return lambda: not done.query()  # type: ignore[no-untyped-call]

    def synchronize(self) -> None:
        """Wait until all work of the device is done."""
        if self.has_streams:
            torch.cuda.synchronize(self.place)

    def facts(self) -> dict[str, str]:
        """Return the device's name and the versions that its figures depend on."""
        found = {"device": self.name, "copies": self.way}
        if self.has_streams:
            cuda: Any = torch.cuda
            found |= {"name": cuda.get_device_name(self.place), "cuda": str(torch.version.cuda), "driver": "unknown"}
            with suppress(OSError), open("/proc/driver/nvidia/version") as lines:
                found["driver"] = lines.readline().partition(":")[2].strip()
        for package in ("torch", "cuda-bindings"):
            with suppress(PackageNotFoundError):
                found[package] = version(package)
        return found
