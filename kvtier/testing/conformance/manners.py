"""Good manners: the loop is everybody's, and a lent buffer is the owner's."""

import asyncio
import gc
from collections.abc import Generator
from contextlib import contextmanager

from blockbuster import BlockBuster, BlockBusterFunction

from kvtier.backend import Backend
from kvtier.testing.conformance.lender import Lender, key_of, keys_of, label
from kvtier.testing.conformance.promises import PATIENCE_S, Promises

# What blockbuster does not watch by itself, and a tier on files would call.
ALSO_BLOCKING = (
    *("builtins.open", "os.open", "os.pread", "os.preadv", "os.pwrite", "os.pwritev", "os.readv", "os.writev"),
    *(
        "os.fsync",
        "os.fdatasync",
        "os.ftruncate",
        "os.truncate",
        "os.posix_fallocate",
        "os.utime",
        "os.copy_file_range",
    ),
)


class GoodManners(Promises):
    async def test_no_call_blocks_the_loop(self, backend: Backend, lender: Lender) -> None:
        """What may wait for a device or for a lock does so elsewhere; the loop goes on."""
        keys = keys_of(8)
        writes, reads = lender.writes(keys), lender.reads([*keys, key_of(9)])
        with _nothing_may_block():
            await backend.store(writes)
            await backend.probe(keys)
            await backend.load(reads)
            await backend.store(writes)
            await backend.delete([*keys[:4], key_of(9)])
            await asyncio.gather(backend.store(writes), backend.load(reads), backend.delete(keys))
            await backend.aclose(PATIENCE_S)

    async def test_a_store_changes_nothing_in_the_buffers(self, backend: Backend, lender: Lender) -> None:
        """The tier only reads what it is given to store."""
        keys = keys_of(8)
        writes = lender.writes(keys)
        await backend.store(writes)
        assert [lender.identify(write.block) for write in writes] == [label(key) for key in keys]

    async def test_what_is_stored_is_a_copy(self, backend: Backend, lender: Lender) -> None:
        """When `store` has answered, the owner may use the buffers for something else."""
        keys = keys_of(8)
        writes = lender.writes(keys)
        assert list(await backend.store(writes)) == [None] * 8
        for _, block in writes:
            block[:] = lender.chunk(key_of(99))
        assert await lender.recall(backend, keys) == [label(key) for key in keys]

    async def test_what_is_loaded_is_a_copy(self, backend: Backend, lender: Lender) -> None:
        """When `load` has answered, the buffers are the owner's, and writing into them changes nothing in the tier."""
        keys = keys_of(8)
        await lender.keep(backend, keys)
        reads = lender.reads(keys)
        assert list(await backend.load(reads)) == [None] * 8
        for _, into in reads:
            into[:] = lender.chunk(key_of(99))
        assert await lender.recall(backend, keys) == [label(key) for key in keys]
        await lender.keep(backend, keys, version=1)
        assert [lender.identify(read.into) for read in reads] == [label(key_of(99))] * 8

    async def test_nothing_beside_the_lent_rows_is_written(self, backend: Backend, lender: Lender) -> None:
        """The rows before and after a lent one are somebody else's."""
        keys = keys_of(8)
        await lender.keep(backend, keys[:6])
        await lender.recall(backend, keys)
        await lender.keep(backend, keys, version=1)
        await asyncio.gather(*(lender.recall(backend, keys) for _ in range(4)))
        assert lender.guards_are_intact()

    async def test_no_buffer_is_kept(self, backend: Backend, lender: Lender) -> None:
        """When a call has answered, nothing of the tier refers to its buffers: their memory can be unmapped.

        A thread may need a moment to forget its last arguments, and that is waited for; an idle one must not keep them.
        """
        keys = keys_of(8)
        await lender.keep(backend, keys)
        assert len(await lender.recall(backend, [*keys, key_of(9)])) == 9
        await lender.keep(backend, keys, version=1)
        gc.collect()
        for patience in range(8):
            if lender.take_back():
                return
            await asyncio.sleep(self.settle_s * 2**patience)
            gc.collect()
        assert lender.take_back(), "somebody still has a view of a lent row"


@contextmanager
def _nothing_may_block() -> Generator[None]:
    """Make blocking calls on the loop raise `blockbuster.BlockingError`."""
    watch = BlockBuster()
    watch.functions |= {name: BlockBusterFunction(None, name) for name in ALSO_BLOCKING}
    watch.activate()
    try:
        yield
    finally:
        watch.deactivate()
