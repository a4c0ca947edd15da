"""Views of a storage, by bytes: what torch counts in elements, from wherever a tensor begins, is all in bytes here."""

import torch


def offset_bytes(tensor: torch.Tensor) -> int:
    """Return where in its storage a tensor begins."""
    return int(tensor.storage_offset()) * tensor.element_size()


def stride_bytes(tensor: torch.Tensor, axis: int) -> int:
    """Return how far the indices of an axis lie apart."""
    return tensor.stride(axis) * tensor.element_size()


def storage_of(tensor: torch.Tensor) -> int:
    """Return what tells a tensor's storage from others."""
    return tensor.untyped_storage().data_ptr()


def view_of(
    memory: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...], start_bytes: int
) -> torch.Tensor:
    """Return a view of the storage of `memory`, zero-copy; strides are in elements of `dtype`."""
    assert start_bytes % dtype.itemsize == 0, start_bytes
    view = torch.empty(0, dtype=dtype, device=memory.device)
    return view.set_(memory.untyped_storage(), start_bytes // dtype.itemsize, shape, strides)
