"""The checks of `kvtier selftest`: every byte in its place, transfers in order with the device's work, and the rates.

A transfer is repeated on a twin of the caches in host memory, and all is compared, so a byte that should not have
changed is found, too. A check raises `Wrong`. A check of order is repeated until the kernel still ran at the
submission.
"""

import random
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
import torch

from kvtier.errors import ConfigError
from kvtier.kvcache import layout
from kvtier.kvcache.layout import CanonicalKVCaches, LayerSpec
from kvtier.kvcache.layout import axes as axes_of
from kvtier.kvcache.layout.axes import CacheAxes
from kvtier.kvcache.transfer import (
    CopiersOf,
    Direction,
    GroupBlocks,
    SlotLayout,
    TransferResult,
    TransferWorker,
    slot_layout,
)
from kvtier.kvcache.transfer.cuda import batched_copy, copiers_with
from kvtier.memory import PAGE_BYTES, Region
from kvtier.tools.figures import ROUNDS, Row, Side, interleaved, rate_of, row_of

SPIN_CYCLES = 400_000_000  # A fifth of a second at 2 GHz: longer than a busy machine takes to submit a transfer.
BLOCKS = 24
TRIES = 5
PASSES = 3  # Stores and loads of random blocks, for each family.
ROWS = 32
CANARY = -86  # 0xAA.
ORDER_PAGES, ORDER_PAGE_BYTES = 64, 256 << 10  # 16 MiB: a third of a millisecond of a fast link.
RATE_LAYERS, RATE_PAGE_BYTES = 8, 64 << 10  # Pages as long as those of an 8B model's layers.
RATE_BYTES = {"cpu": 16 << 20, "cuda": 256 << 20}

host: Any = import_module("kvtier_backends.cpu")  # By name: tools know no tier.


class NotHere(Exception):
    """A check cannot be made on this device; the reason is the message."""


class Wrong(Exception):
    """A promise was broken; the message says how."""


class TorchDevice:
    """The place of the KV caches, and the copies that transfers use there."""

    def __init__(self, name: str) -> None:
        """Raise `ConfigError` if torch does not find the device here."""
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
        if self.has_streams:
            torch.cuda.synchronize(self.place)

    def facts(self) -> dict[str, str]:
        found = {"device": self.name, "copies": self.way, "torch": str(torch.__version__)}
        if self.has_streams:
            cuda: Any = torch.cuda
            found |= {"name": cuda.get_device_name(self.place), "cuda": str(torch.version.cuda)}
        return found


class Family(NamedTuple):
    """A layout: the specs of each group's layers, the order of their axes, and whether a block's pages share a row."""

    name: str
    groups: Sequence[Sequence[LayerSpec]]
    axes: CacheAxes
    in_rows: bool = False
    blocks_per_chunk: int = 1
    kernel_tokens: int | None = None

    @property
    def config(self) -> layout.KVCacheConfig:
        groups = (
            layout.KVCacheGroup(
                layers={f"{group}.{layer}": spec for layer, spec in enumerate(specs)},
                kernel_block_size=self.kernel_tokens,
            )
            for group, specs in enumerate(self.groups)
        )
        return layout.KVCacheConfig(num_blocks=BLOCKS, groups=tuple(groups))


def families() -> list[Family]:
    bf16, fp8 = [_attention(torch.bfloat16)] * 8, [_attention(torch.float8_e4m3fn)] * 8
    mla = layout.AttentionSpec(block_size=16, num_kv_heads=1, head_size=576, head_size_v=0, dtype=torch.bfloat16)
    attending = [_attention(torch.bfloat16, block_size=80, heads=2)] * 2
    states = [
        layout.MambaSpec(
            block_size=80,
            shapes=((3, 256), (256, 16)),
            dtypes=(torch.bfloat16, torch.float32),
            padded_page_bytes=attending[0].page_bytes,
        )
    ] * 2
    return [
        Family("a tensor for each layer, bf16", [bf16], axes_of.KV_JOINED_NHD, blocks_per_chunk=4),
        Family("keys in front, fp8", [fp8], axes_of.KV_FRONT_HND),
        Family("heads in front, bf16", [bf16], axes_of.HEADS_FRONT),
        Family("contiguous: all layers in one row, fp8", [fp8], axes_of.KV_SPLIT_HND, in_rows=True),
        Family("contiguous, in kernel blocks, bf16", [bf16], axes_of.KV_JOINED_NHD, True, kernel_tokens=8),
        Family("MLA, bf16", [[mla] * 8], axes_of.LATENT, blocks_per_chunk=2),
        Family("packed: latents of three lengths in one row", [_latents() * 3], axes_of.LATENT, in_rows=True),
        Family("windows and full attention in turn, bf16", [bf16[:4]] * 2, axes_of.KV_JOINED_HND, False, 3),
        Family("hybrid: states and attention, padded", [attending, states, states, states], axes_of.KV_JOINED_NHD),
    ]


def _attention(dtype: torch.dtype, block_size: int = 16, heads: int = 4) -> LayerSpec:
    return layout.AttentionSpec(block_size=block_size, num_kv_heads=heads, head_size=64, dtype=dtype)


def _latents() -> list[LayerSpec]:
    return [
        layout.AttentionSpec(
            block_size=64,
            num_kv_heads=1,
            head_size=128,
            dtype=torch.uint8,
            state_bytes=size,
            tokens_per_state=tokens,
            align_bytes=576,
        )
        for size, tokens in ((584, 4), (132, 4), (584, 16))
    ]


class Caches(NamedTuple):
    canonical: CanonicalKVCaches
    memories: list[torch.Tensor]  # All bytes of every allocation, as uint8.

    def fill(self, seed: int) -> None:
        """Fill all memory with random bytes that depend on the seed alone."""
        for number, memory in enumerate(self.memories):
            memory.copy_(random_bytes((memory.nbytes,), seed + number).view(torch.uint8))


def caches_of(family: Family, place: torch.device) -> Caches:
    config = family.config
    axes = {
        name: family.axes
        for group in config.groups
        for name, spec in group.layers.items()
        if isinstance(spec, layout.AttentionSpec)
    }
    if family.in_rows:
        canonical = layout.allocate_rows(config, axes, place).canonical
    else:
        canonical = layout.canonical_kv_caches(config, layout.allocate_tensors(config, axes, place), axes)
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in canonical.tensors}
    return Caches(canonical, [torch.empty(0, dtype=torch.uint8, device=place).set_(each) for each in storages.values()])


def plain_caches(count: int, blocks: int, page_bytes: int, place: torch.device) -> CanonicalKVCaches:
    """Allocate layers with full attention whose pages have this length, a multiple of 2 KiB."""
    layers = [_attention(torch.bfloat16, page_bytes // 2_048, heads=8)] * count
    config = msgspec.structs.replace(Family("plain", [layers], axes_of.KV_JOINED_HND).config, num_blocks=blocks)
    axes = dict.fromkeys(config.groups[0].layers, axes_of.KV_JOINED_HND)
    return layout.canonical_kv_caches(config, layout.allocate_tensors(config, axes, place), axes)


def random_bytes(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return torch.as_tensor(np.random.default_rng(seed).integers(-128, 128, shape, dtype=np.int8))


def requests_of(family: Family, rows: int, seed: int) -> list[GroupBlocks]:
    """Return random blocks of each group, for random rows, from any place in a chunk on. No two groups share any."""
    dice = random.Random(seed)
    groups, per_chunk = len(family.config.groups), family.blocks_per_chunk
    blocks, free = dice.sample(range(BLOCKS), BLOCKS), dice.sample(range(rows), rows)
    found = list[GroupBlocks]()
    for group in range(groups):
        count, first = dice.randint(1, BLOCKS // groups), dice.randrange(2 * per_chunk)
        chunks = -(-(first % per_chunk + count) // per_chunk)
        found.append(GroupBlocks(blocks[group::groups][:count], free[group::groups][:chunks], first))
    return found


def move_by_hand(
    direction: Direction,
    caches: CanonicalKVCaches,
    slots: SlotLayout,
    rows: torch.Tensor,
    groups: Sequence[GroupBlocks],
) -> None:
    """Do a transfer in host memory, page by page. The slots are at the start of `rows`."""
    for refs, request in zip(caches.groups, groups, strict=True):
        for ref in refs:
            for index, block in enumerate(request.blocks):
                chunk, position = divmod(request.first_block % slots.blocks_per_chunk + index, slots.blocks_per_chunk)
                start = slots.offsets[ref.tensor] + position * slots.page_bytes[ref.tensor]
                in_row = rows[int(request.rows[chunk]), start : start + ref.page_bytes]
                page = caches.tensors[ref.tensor][int(block), : ref.page_bytes]
                target, source = (in_row, page) if direction is Direction.STORE else (page, in_row)
                target.copy_(source)


def require_same(what: str, found: torch.Tensor, right: torch.Tensor) -> None:
    """Compare bytes on the device of `found`; `Wrong` counts those that differ and names the first."""
    differs = (found.view(torch.uint8) != right.to(found.device).view(torch.uint8)).flatten()
    if count := int(differs.sum()):
        first = int(differs.to(torch.uint8).argmax())
        raise Wrong(f"{what}: {count:,} of {differs.numel():,} bytes are wrong, the first at {first:,}")


def checks() -> list[tuple[str, Callable[[TorchDevice], str]]]:
    """Return every promise and its check, which returns a detail, or raises `Wrong` or `NotHere`."""
    return [
        *((f"blocks come back bit for bit: {each.name}", partial(come_back, each)) for each in families()),
        ("a store waits for the kernel that writes its blocks", partial(transfers_wait, Direction.STORE)),
        ("a load waits for the kernel that reads its blocks", partial(transfers_wait, Direction.LOAD)),
    ]


def outcome_of(
    check: Callable[[TorchDevice], str], device: TorchDevice
) -> tuple[Literal["kept", "broken", "skipped"], str]:
    """Make a check; return its outcome and its detail. The failure of one does not end the others."""
    try:
        return "kept", check(device)
    except NotHere as reason:
        return "skipped", str(reason)
    except Exception as error:  # noqa: BLE001  # Drivers raise what they like.
        return "broken", f"{type(error).__name__}: {error}"


def come_back(family: Family, device: TorchDevice) -> str:
    """Store random blocks in random rows, load them into others, and compare everything with the twin's."""
    moved = 0
    here, twin = caches_of(family, device.place), caches_of(family, torch.device("cpu"))
    slots = slot_layout(here.canonical, family.blocks_per_chunk)
    with worker_and_rows(device, here.canonical, ROWS, family.blocks_per_chunk) as (worker, rows):
        right = rows.fill_(CANARY).clone()
        for number in range(PASSES):
            here.fill(100 * number)
            twin.fill(100 * number)
            device.synchronize()
            for turn, direction in enumerate((Direction.STORE, Direction.LOAD)):
                groups = requests_of(family, ROWS, 2 * number + turn)
                moved += transfer(worker, direction, groups).size_bytes
                move_by_hand(direction, twin.canonical, slots, right, groups)
                require_same("rows", rows, right)
                for memory, expected in zip(here.memories, twin.memories, strict=True):
                    require_same("caches, compared on the device", memory, expected)
                    require_same("caches, compared on the host", memory.cpu(), expected)
    return f"{PASSES} times each way, {moved:,} bytes"


def transfers_wait(direction: Direction, device: TorchDevice) -> str:
    """Submit a store behind a delayed kernel that writes its blocks, or a load behind one that reads its blocks."""
    if not device.has_streams:
        raise NotHere(f"{device.name} has no streams: it does at once whatever is launched")
    layer = plain_caches(1, ORDER_PAGES, ORDER_PAGE_BYTES, device.place)
    cache, everything = layer.tensors[0], [GroupBlocks(range(ORDER_PAGES), range(ORDER_PAGES))]
    with worker_and_rows(device, layer, ORDER_PAGES) as (worker, whole_rows):
        rows, right = whole_rows[:, :ORDER_PAGE_BYTES], random_bytes(tuple(cache.shape), 1)
        fresh, read = right.to(device.place), torch.empty_like(cache)
        for attempt in range(1, TRIES + 1):
            cache.fill_(CANARY)
            rows.copy_(right) if direction is Direction.LOAD else rows.fill_(CANARY)
            late = partial(read.copy_, cache) if direction is Direction.LOAD else partial(cache.copy_, fresh)
            pending = device.launch_late(late)
            submit(worker, direction, everything)
            in_time = pending()
            finished(worker)
            require_same("rows", rows, right)
            require_same("blocks", cache, right)
            if direction is Direction.LOAD:
                require_same("blocks read before the load", read, torch.full_like(read, CANARY))
            if in_time:
                return f"submitted before the kernel had finished, in attempt {attempt}"
    raise Wrong(f"in {TRIES} attempts the kernel had finished before the transfer was submitted: nothing was proved")


def rates(device: TorchDevice) -> list[Row]:
    """Return MB/s of stores and loads at random places beside a plain copy; an allocation a layer: the hardest case."""
    moved_bytes, chunk_bytes = RATE_BYTES[device.name], RATE_LAYERS * RATE_PAGE_BYTES
    chunks = moved_bytes // chunk_bytes
    there = torch.ones(moved_bytes, dtype=torch.int8, device=device.place)
    here = torch.ones(moved_bytes, dtype=torch.int8, pin_memory=device.has_streams)
    paged = plain_caches(RATE_LAYERS, 2 * chunks, RATE_PAGE_BYTES, device.place)

    def plain_copy(target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source, non_blocking=True)
        device.synchronize()

    with worker_and_rows(device, paged, 2 * chunks) as (worker, _):
        dice = np.random.default_rng(1)
        blocks, into = (dice.permutation(2 * chunks)[:chunks] for _ in range(2))
        copies: dict[str, Callable[[], object]] = {
            "store": lambda: transfer(worker, Direction.STORE, [GroupBlocks(blocks, into)]),
            "load": lambda: transfer(worker, Direction.LOAD, [GroupBlocks(blocks, into)]),
            "to host": lambda: plain_copy(here, there),
            "to device": lambda: plain_copy(there, here),
        }
        measured = interleaved([Side(name, rate_of(copy, moved_bytes)) for name, copy in copies.items()], ROUNDS)
    pages = {"page_bytes": RATE_PAGE_BYTES, "layers": RATE_LAYERS}
    return [
        row_of(way, measured[way], measured[limit], f"one plain copy {limit}", pages, chunk_bytes=chunk_bytes)
        for way, limit in (("store", "to host"), ("load", "to device"))
    ]


@contextmanager
def worker_and_rows(
    device: TorchDevice, canonical: CanonicalKVCaches, rows: int, blocks_per_chunk: int = 1
) -> Generator[tuple[TransferWorker, torch.Tensor]]:
    """Give a worker between caches and pinned rows, which are a page longer than their slots."""
    slot_bytes = slot_layout(canonical, blocks_per_chunk).slot_bytes
    row_bytes = (slot_bytes // PAGE_BYTES + 1) * PAGE_BYTES
    with Region.private(rows, row_bytes) as region, host.CpuMemory(region, pin_with=device.pin_with) as memory:
        if device.pin_with is not None and not memory.pinned:
            raise Wrong(f"{rows * row_bytes:,} bytes of host memory could not be pinned")
        slots = memory.rows[:, :slot_bytes]
        with TransferWorker(canonical, slots, blocks_per_chunk=blocks_per_chunk, copiers=device.copiers) as worker:
            yield worker, memory.rows


def transfer(worker: TransferWorker, direction: Direction, groups: Sequence[GroupBlocks]) -> TransferResult:
    submit(worker, direction, groups)
    return finished(worker)


def submit(worker: TransferWorker, direction: Direction, groups: Sequence[GroupBlocks], job_id: int = 1) -> None:
    (worker.submit_store if direction is Direction.STORE else worker.submit_load)(job_id, groups)


def finished(worker: TransferWorker) -> TransferResult:
    """Wait for the one transfer in flight and return its result; `Wrong` if it failed."""
    worker.wait([1])
    (result,) = worker.poll()
    if result.error is not None:
        raise Wrong(str(result.error))
    return result
