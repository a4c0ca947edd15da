"""Which bytes of a block are which bytes of a row: one `Copy` for every stretch that both sides lay out regularly."""

from typing import NamedTuple

import torch
from vllm.v1.kv_offload.base import CanonicalKVCacheRef, CanonicalKVCaches, CopyRun

from kvtier.integrations.vllm.rows import RowPlan

_WORDS = (torch.int64, torch.int32, torch.int16, torch.int8)  # The widest that fits copies an eighth as many elements.


class Places(NamedTuple):
    """Where a transfer's blocks lie: block `blocks[i]` is page `pages[i]` of row `rows[i]`."""

    blocks: torch.Tensor
    rows: torch.Tensor
    pages: torch.Tensor


class Shape(NamedTuple):
    """Equal fragments at equal distances, in bytes, in each of the outer dimensions."""

    start: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]


class Copy:
    """The same fragments of every block, in the KV cache and in the rows."""

    def __init__(self, cache: torch.Tensor, rows: torch.Tensor, *, writers: int = 1, writer: int = 0) -> None:
        """`cache` is indexed by block, `rows` by row and page. Of `writers` with the same bytes this is one."""
        self._cache = cache
        self._rows = rows
        self._writers = writers
        self._writer = writer
        self._block_bytes = cache[0].numel() * cache.element_size()

    def store(self, places: Places) -> int:
        """Copy blocks into rows; return how many bytes. Writers of the same bytes take turns, page by page."""
        blocks, rows, pages = places
        if self._writers > 1:
            mine = (rows * self._rows.shape[1] + pages) % self._writers == self._writer
            blocks, rows, pages = blocks[mine], rows[mine], pages[mine]
        self._rows[rows, pages] = self._cache[blocks]
        return len(blocks) * self._block_bytes

    def load(self, places: Places) -> int:
        """Copy rows into blocks; return how many bytes."""
        blocks, rows, pages = places
        self._cache[blocks] = self._rows[rows, pages]
        return len(blocks) * self._block_bytes


def page_copies(
    kv_caches: CanonicalKVCaches, rows: torch.Tensor, plan: RowPlan, blocks_per_chunk: int
) -> list[list[Copy]]:
    """Return each KV-cache group's copies. `rows` is the region, of shape (rows, row_bytes) and type int8."""
    page_bytes = _page_bytes(kv_caches, canonical=plan.canonical)
    starts = [plan.slot_start + sum(page_bytes[:index]) * blocks_per_chunk for index in range(len(page_bytes))]

    def copies_of(ref: CanonicalKVCacheRef) -> list[Copy]:
        cache = kv_caches.tensors[ref.tensor_idx].tensor
        count, row_bytes = rows.shape
        page, start = page_bytes[ref.tensor_idx], starts[ref.tensor_idx]
        runs, writers, writer = _runs(ref, canonical=plan.canonical)
        copies: list[Copy] = []
        for run in runs:
            fragments = (run.num_fragments, run.fragment_size)
            ours = Shape(
                start + run.canonical_offset,
                (count, blocks_per_chunk, *fragments),
                (row_bytes, page, run.canonical_stride, 1),
            )
            theirs = Shape(run.local_offset, (len(cache), *fragments), (cache.stride(0), run.local_stride, 1))
            copies.append(Copy(*_views((cache, theirs), (rows, ours)), writers=writers, writer=writer))
        return copies

    # Layers that lie over each other name the same bytes: these are copied once.
    return [
        [copy for ref in dict.fromkeys((ref.tensor_idx, ref.page_size_bytes, ref.mapping) for ref in refs)
         for copy in copies_of(CanonicalKVCacheRef(*ref))]
        for refs in kv_caches.group_data_refs
    ]


def _page_bytes(kv_caches: CanonicalKVCaches, *, canonical: bool) -> list[int]:
    """Return how much of a row each tensor takes for one block."""
    if not canonical:
        return [tensor.page_size_bytes for tensor in kv_caches.tensors]
    sizes = [0] * len(kv_caches.tensors)
    for refs in kv_caches.group_data_refs:
        for ref in refs:
            assert ref.mapping is not None, "canonical pages need a certified mapping"
            sizes[ref.tensor_idx] = max(sizes[ref.tensor_idx], ref.mapping.canonical_page_size_bytes)
    return sizes


def _runs(ref: CanonicalKVCacheRef, *, canonical: bool) -> tuple[tuple[CopyRun, ...], int, int]:
    """Return a page's fragments, how many workers hold the same bytes, and which of them this one is."""
    if canonical:
        assert ref.mapping is not None
        return ref.mapping.runs, ref.mapping.num_writers, ref.mapping.writer_index
    size = ref.page_size_bytes
    return (CopyRun(0, 0, size, 1, size, size),), 1, 0


def _views(*sides: tuple[torch.Tensor, Shape]) -> list[torch.Tensor]:
    """View each side's bytes in its shape, both as the widest words that fit everything."""
    numbers = [
        number
        for tensor, shape in sides
        for number in (tensor.data_ptr(), shape.start, shape.sizes[-1], *shape.strides[:-1])
    ]
    word = next(dtype for dtype in _WORDS if all(number % dtype.itemsize == 0 for number in numbers))
    return [_view(tensor, shape, word) for tensor, shape in sides]


def _view(tensor: torch.Tensor, shape: Shape, word: torch.dtype) -> torch.Tensor:
    width = word.itemsize
    start = tensor.storage_offset() * tensor.element_size() + shape.start
    sizes = (*shape.sizes[:-1], shape.sizes[-1] // width)
    strides = (*(stride // width for stride in shape.strides[:-1]), 1)
    return torch.tensor([], dtype=word).set_(tensor.untyped_storage(), start // width, sizes, strides)
