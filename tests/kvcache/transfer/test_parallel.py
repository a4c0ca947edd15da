"""Canonical pages: written by so many workers, read by any other number, as one alone would have written them."""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvtier.kvcache.layout import (
    CacheAxes,
    CanonicalKVCaches,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroup,
    KVCacheTensor,
    LayerSpec,
    MLASpec,
    ParallelConfig,
    SlidingWindowSpec,
    allocate_tensors,
    canonical_kv_caches,
)
from kvtier.kvcache.layout.axes import (
    KV_FRONT_HND,
    KV_FRONT_NHD,
    KV_JOINED_HND,
    KV_JOINED_NHD,
    KV_SPLIT_HND,
    KV_SPLIT_NHD,
    LATENT,
)
from kvtier.kvcache.transfer import GroupBlocks, TransferWorker, slot_layout

SIZES = (1, 2, 4, 8)
ORDERS = (KV_FRONT_NHD, KV_FRONT_HND, KV_SPLIT_NHD, KV_SPLIT_HND, KV_JOINED_NHD, KV_JOINED_HND)
BLOCKS, BLOCK_SIZE, ROWS = 6, 4, 5
REQUEST = [GroupBlocks([4, 1, 3], [2, 0], 1), GroupBlocks([0, 5], [4], 0)]  # From the middle of a chunk of two.

# The device is the same for all examples.
ONE_DEVICE = settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


class Whole:
    """All heads of a two-group model: what a worker of any number has its part of."""

    def __init__(self, heads: int, axes: CacheAxes, kernel_blocks: int, *, latent: bool) -> None:
        self.heads, self.axes, self.kernel_blocks, self.latent = heads, axes, kernel_blocks, latent

    def spec(self, tp_size: int, group: int) -> LayerSpec:
        if self.latent and not group:
            return MLASpec(block_size=BLOCK_SIZE, head_size=16, dtype=torch.float32)
        heads = max(1, self.heads // tp_size)
        fields = {"block_size": BLOCK_SIZE, "num_kv_heads": heads, "head_size": 8, "dtype": torch.bfloat16}
        return SlidingWindowSpec(**fields, sliding_window=9) if group else FullAttentionSpec(**fields)

    def axes_of(self, layer: str, tp_size: int) -> CacheAxes:
        return LATENT if isinstance(self.spec(tp_size, int(layer[0])), MLASpec) else self.axes

    def worker(self, tp_size: int, rank: int, device: str) -> tuple[dict[str, torch.Tensor], CanonicalKVCaches]:
        layers = {f"{group}.{layer}": self.spec(tp_size, group) for group in range(2) for layer in range(2)}
        config = KVCacheConfig(
            num_blocks=BLOCKS,
            tensors=tuple(
                KVCacheTensor(size_bytes=spec.page_bytes * BLOCKS, shared_by=(name,)) for name, spec in layers.items()
            ),
            groups=tuple(
                KVCacheGroup(
                    layer_names=(f"{group}.0", f"{group}.1"),
                    spec=layers[f"{group}.0"],
                    kernel_block_size=BLOCK_SIZE // self.kernel_blocks,
                )
                for group in range(2)
            ),
        )
        axes = {layer: self.axes_of(layer, tp_size) for layer in layers}
        caches = allocate_tensors(config, axes, device)
        tensors = {name: cache for name, cache in caches.items() if isinstance(cache, torch.Tensor)}
        parallel = ParallelConfig(tp_size=tp_size, rank=rank)
        return tensors, canonical_kv_caches(config, caches, axes, parallel=parallel, total_kv_heads=self.heads)

    def part(self, layer: str, tp_size: int, rank: int) -> torch.Tensor:
        """Return what a worker has of a layer, from a table of all heads: worked out from its axes' names alone."""
        axes, spec = self.axes_of(layer, tp_size), self.spec(1, int(layer[0]))
        sizes = axes.sizes(spec, BLOCKS, self.kernel_blocks)
        shape = tuple(sizes[axis] for axis in axes.shape)
        seed = int(layer.replace(".", ""))
        data = np.random.default_rng(seed).integers(0, 256, (*shape, spec.dtype.itemsize), dtype=np.uint8)
        whole = torch.from_numpy(data).view(spec.dtype).squeeze(-1)
        if "H" not in axes.shape:
            return whole
        heads = max(1, self.heads // tp_size)
        first = rank * self.heads // tp_size if self.heads >= tp_size else rank // (tp_size // self.heads)
        return whole.narrow(axes.shape.index("H"), first, heads)


@pytest.fixture(params=SIZES, ids=lambda size: f"written-by-{size}")
def writers(request: pytest.FixtureRequest) -> int:
    return request.param


def rows_for(whole: Whole, device: str) -> torch.Tensor:
    layout = slot_layout(whole.worker(1, 0, device)[1], 2, canonical=True)
    return torch.zeros((ROWS, layout.slot_bytes + 32), dtype=torch.int8)


def store(whole: Whole, tp_size: int, rows: torch.Tensor, device: str) -> int:
    moved = 0
    for rank in range(tp_size):
        tensors, canonical = whole.worker(tp_size, rank, device)
        assert canonical.topology_free
        for layer, tensor in tensors.items():
            tensor.copy_(whole.part(layer, tp_size, rank))
        with TransferWorker(canonical, rows, blocks_per_chunk=2, canonical=True) as worker:
            worker.submit_store(1, REQUEST)
            assert worker.wait([1])
            (result,) = worker.poll()
            assert result.error is None
            moved += result.size_bytes
    return moved


@ONE_DEVICE
@given(
    heads=st.sampled_from([1, 2, 4, 8]),
    axes=st.sampled_from(ORDERS),
    kernel_blocks=st.sampled_from([1, 2]),
    latent=st.booleans(),
    readers=st.sampled_from(SIZES),
)
def test_rows_written_by_some_workers_are_read_by_any_others(
    heads: int, axes: CacheAxes, kernel_blocks: int, latent: bool, readers: int, writers: int, device: str
) -> None:
    whole = Whole(heads, axes, kernel_blocks, latent=latent)
    alone = rows_for(whole, device)
    written_alone = store(whole, 1, alone, device)
    rows = torch.zeros_like(alone)
    assert store(whole, writers, rows, device) == written_alone  # Each byte was written once.
    assert torch.equal(rows, alone)
    for rank in range(readers):
        assert_reads(whole, readers, rank, rows, device)


def assert_reads(whole: Whole, tp_size: int, rank: int, rows: torch.Tensor, device: str) -> None:
    tensors, canonical = whole.worker(tp_size, rank, device)
    with TransferWorker(canonical, rows, blocks_per_chunk=2, canonical=True) as worker:
        worker.submit_load(1, REQUEST)
        assert worker.wait([1])
    for layer, tensor in tensors.items():
        fresh = torch.zeros_like(tensor)
        axis = whole.axes_of(layer, tp_size).shape.index("B")
        for block in REQUEST[int(layer[0])].blocks:
            kernel_blocks = (axis, int(block) * whole.kernel_blocks, whole.kernel_blocks)
            fresh.narrow(*kernel_blocks).copy_(whole.part(layer, tp_size, rank).narrow(*kernel_blocks))
        assert torch.equal(tensor.view(torch.uint8), fresh.view(torch.uint8))


def test_each_of_the_workers_that_hold_the_same_bytes_writes_its_turn(device: str) -> None:
    whole = Whole(2, KV_JOINED_NHD, 1, latent=True)
    moved = list[int]()
    for rank in range(4):
        _, canonical = whole.worker(4, rank, device)
        rows = rows_for(whole, device)
        with TransferWorker(canonical, rows, blocks_per_chunk=2, canonical=True) as worker:
            worker.submit_store(1, [GroupBlocks([0, 1, 2, 3], [0, 1]), GroupBlocks([], [])])
            assert worker.wait([1])
            moved.append(worker.poll()[0].size_bytes)
    latent_page_bytes = BLOCK_SIZE * 16 * 4
    assert moved == [2 * latent_page_bytes] * 4  # One of four pages, of two layers.
