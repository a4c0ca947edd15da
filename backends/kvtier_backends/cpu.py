"""The primary's host memory for a worker: torch views of a region's rows, pinned for the GPU. Only workers use CUDA."""

import ctypes
import logging
import os
from contextlib import AbstractContextManager
from typing import Protocol, SupportsInt, cast

from kvtier.errors import Remedy
from kvtier.memory import Region

try:
    import torch
except ModuleNotFoundError as error:
    needed = "kvtier_backends.cpu needs torch; install it with: pip install 'kvtier[torch]'"
    raise ModuleNotFoundError(needed, name="torch") from error

PIN_SLICE_BYTES = 4 << 30  # Drivers limit one registration. A failure undoes a second of work.
_REGISTER_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device of this process.

logger = logging.getLogger(__name__)


class HostRegister(Protocol):
    """The part of `torch.cuda.cudart()` that pins memory. Each call returns a cudaError."""

    def cudaHostRegister(self, address: int, size_bytes: int, flags: int, /) -> SupportsInt: ...  # noqa: N802
    def cudaHostUnregister(self, address: int, /) -> SupportsInt: ...  # noqa: N802


def cuda_runtime() -> HostRegister | None:
    """Initialise CUDA and return its runtime; None without a CUDA device."""
    if not torch.cuda.is_available():
        return None
    return cast("HostRegister", torch.cuda.cudart())  # type: ignore[no-untyped-call]


class CpuMemory(AbstractContextManager["CpuMemory", None]):
    """Views of a region's rows as torch.int8 tensors, zero-copy; each keeps the memory mapped.

    With `pin_with` (a worker passes `cuda_runtime()`) the rows are pinned, or a warning is logged: copies are slower.
    """

    def __init__(
        self, region: Region, *, pin_with: HostRegister | None = None, pin_slice_bytes: int = PIN_SLICE_BYTES
    ) -> None:
        self.rows = torch.frombuffer(region.view, dtype=torch.int8).view(region.rows, region.row_bytes)
        self._pin_with = pin_with
        self._pinned: list[int] = []  # Addresses, one for each slice.
        if pin_with is not None:
            self._pin(pin_with, pin_slice_bytes)

    @property
    def pinned(self) -> bool:
        return bool(self._pinned)

    def row(self, index: int) -> torch.Tensor:
        """Return one row, of shape (row_bytes,)."""
        return self.rows[index]

    def close(self) -> None:
        """Unpin and release the memory. No copy may be in flight. May be called again."""
        if self._pin_with is not None:
            self._unpin(self._pin_with)
        self.rows = self.rows.new_empty((0, self.rows.shape[1]))

    def __exit__(self, *error: object) -> None:
        self.close()

    def _pin(self, runtime: HostRegister, slice_bytes: int) -> None:
        """Register the rows, slice by slice; undo it all if one is refused."""
        count, row_bytes = self.rows.shape
        slice_rows = max(1, slice_bytes // row_bytes)  # Whole rows: a copy must not reach over two registrations.
        for first in range(0, count, slice_rows):
            part = self.rows[first : first + slice_rows]
            if code := int(runtime.cudaHostRegister(part.data_ptr(), part.numel(), _REGISTER_PORTABLE)):
                _forget_last_error()
                logger.warning(
                    "Host memory stays unpinned, its copies slow: cudaHostRegister failed with %d at row %d of %d; "
                    "see %s",
                    code,
                    first,
                    count,
                    Remedy.UNPINNED,
                )
                self._unpin(runtime)
                return
            self._pinned.append(part.data_ptr())

    def _unpin(self, runtime: HostRegister) -> None:
        while self._pinned:
            if code := int(runtime.cudaHostUnregister(self._pinned.pop())):
                _forget_last_error()
                logger.warning("cudaHostUnregister failed with error %d; see %s", code, Remedy.UNPINNED)


def _forget_last_error() -> None:
    """Clear the CUDA runtime's last error, else torch's next kernel launch raises it; torch has no such call."""
    if torch.version.cuda is None:
        return
    try:
        runtime = ctypes.CDLL(f"libcudart.so.{torch.version.cuda.split('.')[0]}", mode=os.RTLD_NOLOAD)
    except OSError:
        logger.debug("No shared CUDA runtime is loaded; its last error stays")
    else:
        runtime.cudaGetLastError()
