"""What a file tier is made of, put together: nothing here decides anything, and nothing runs yet."""

import time
from contextlib import ExitStack
from dataclasses import dataclass
from typing import NamedTuple

from kvtier.backend import TierContext
from kvtier.lend import Lanes
from kvtier.naming import FLAT_FOLDERS
from kvtier.policies.lru import LRU
from kvtier.policies.named import policy_class
from kvtier_backends.fs.books import Books
from kvtier_backends.fs.capacity import Capacity
from kvtier_backends.fs.checkpoint import Checkpoint
from kvtier_backends.fs.chunks import Chunks, share_least
from kvtier_backends.fs.claims import Claims
from kvtier_backends.fs.counters import Tally
from kvtier_backends.fs.eviction import Eviction
from kvtier_backends.fs.files import ChunkFiles
from kvtier_backends.fs.folder import Folder
from kvtier_backends.fs.index import Index
from kvtier_backends.fs.loading import Loading
from kvtier_backends.fs.looking import Looking
from kvtier_backends.fs.options import FsOptions
from kvtier_backends.fs.precedence import Precedence
from kvtier_backends.fs.recycling import Recycling
from kvtier_backends.fs.shared import SharedEviction
from kvtier_backends.fs.storing import Storing, sizes_of

FOLDERS_SHARE = (
    1 / 16
)  # Of the room, for folders that are kept when they are empty: making one costs as much as a file.


class TierLanes(NamedTuple):
    """A tier's threads, by what they may be held up by."""

    load: Lanes
    store: Lanes
    scan: Lanes
    evict: Lanes


@dataclass(frozen=True, slots=True)
class Parts:
    """What the tier's methods call."""

    index: Index
    capacity: Capacity
    chunks: Chunks
    claims: Claims
    eviction: Eviction
    loading: Loading
    storing: Storing
    looking: Looking


def start_lanes(options: FsOptions, name: str, scan: Lanes) -> TierLanes:
    """Start the threads that are not there yet."""
    counts = {"load": options.load_lanes, "store": options.store_lanes, "evict": 1}
    with ExitStack() as undo:  # A process may have no more threads.
        lanes: list[Lanes] = []
        for what, count in counts.items():
            lanes.append(Lanes(count, f"kvtier-{name}-{what}"))
            undo.callback(lanes[-1].shutdown, wait=False)
        undo.pop_all()
    load, store, evict = lanes
    return TierLanes(load, store, scan, evict)


def assemble(
    options: FsOptions, context: TierContext, folder: Folder, books: Books, tally: Tally, lanes: TierLanes
) -> Parts:
    """Make a tier's parts over an opened folder, on the running loop."""
    clock_ns, sizes = time.time_ns, sizes_of(context.row_bytes, folder)
    limit_bytes = min(options.capacity_bytes or folder.disk.size_bytes, folder.disk.size_bytes)
    kind = policy_class(options.eviction_policy)
    policy = None if kind is LRU else kind(max(1, limit_bytes // context.row_bytes))  # LRU: the index has that order.
    index = Index(policy, None if options.ttl_s is None else clock_ns)
    checkpoint = Checkpoint(folder, context.mapper, tally, context.row_bytes)
    checkpoint_s = 0 if options.shared else options.checkpoint_s
    capacity = Capacity(
        (index, folder.sizes, checkpoint, folder.quarantine),
        folder.disk,
        limit_bytes=options.capacity_bytes,
        low_water=1.0 if options.overwrites else options.low_water,
        min_free_bytes=options.min_free_bytes,
        kept_free_bytes=checkpoint.bytes_worst(limit_bytes // context.row_bytes) if checkpoint_s else 0,
    )
    precedence = Precedence()
    chunks = Chunks(
        ChunkFiles(
            folder,
            context.mapper,
            precedence,
            fsync=options.fsync,
            keeps_folders=options.overwrites and FLAT_FOLDERS * folder.sizes.new_bytes <= limit_bytes * FOLDERS_SHARE,
        ),
        tally,
        precedence,
        lanes=options.load_lanes + options.store_lanes,
        row_bytes=context.row_bytes,
        fingerprint=context.mapper.fingerprint,
        accept_bare=options.unverified == "accept",
        reads=folder.reads,
    )
    claims = Claims()
    kind_of_eviction = SharedEviction if options.shared else Recycling if options.overwrites else Eviction
    eviction = kind_of_eviction(
        index,
        capacity,
        chunks,
        claims,
        tally,
        folder.quarantine,
        lane=lanes.evict,
        store_lanes=lanes.store,
        ttl_s=options.ttl_s,
        clock_ns=clock_ns,
    )
    if isinstance(eviction, SharedEviction):
        assert books.ledger is not None
        eviction.share(books.ledger, folder.sizes)
    if books.write_budget is not None:
        books.write_budget.use(lanes.store)
    loading = Loading(
        eviction,
        claims,
        capacity,
        index,
        chunks,
        precedence,
        lanes=lanes.load,
        share_chunks=sizes.share_chunks,
        share_least=share_least(context.row_bytes, folder.reads.queue_bytes),
        clock_ns=clock_ns,
    )
    storing = Storing(
        eviction, claims, books.write_budget, index, chunks, tally, lanes=lanes.store, sizes=sizes, clock_ns=clock_ns
    )
    looking = Looking(
        folder,
        context.mapper,
        chunks.takes,
        index,
        capacity,
        eviction,
        tally,
        lane=lanes.scan,
        checkpoint=checkpoint,
        checkpoint_s=checkpoint_s,
    )
    return Parts(index, capacity, chunks, claims, eviction, loading, storing, looking)
