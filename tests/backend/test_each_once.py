"""A key that comes twice in a batch is moved once, and every place of it is answered."""

from kvtier.backend import ChunkMissing, Read, Write, load_each_once, store_each_once
from kvtier.testing.conformance import key_of

ONE, TWO, GONE = key_of(1), key_of(2), key_of(3)


class Service:
    """Fills one buffer of each key, as some do, and takes the first of two that are stored."""

    def __init__(self):
        self.held, self.asked = {ONE: b"1111", TWO: b"2222"}, []

    async def load(self, reads):
        self.asked += [read.key for read in reads]
        for key, into in reads:
            into[:] = self.held.get(key, b"????")
        return [None if read.key in self.held else ChunkMissing(read.key.hex()) for read in reads]

    async def store(self, writes):
        self.asked += [write.key for write in writes]
        self.held = {write.key: bytes(write.row) for write in reversed(writes)}
        return [None] * len(writes)


def reads_of(*keys):
    return [Read(key, memoryview(bytearray(4))) for key in keys]


async def test_a_key_that_comes_again_is_loaded_once_into_every_place():
    service, reads = Service(), reads_of(ONE, TWO, ONE, GONE, ONE, GONE)
    outcomes = await load_each_once(reads, service.load)
    assert service.asked == [ONE, TWO, GONE]
    assert [type(outcome) for outcome in outcomes] == [type(None)] * 3 + [ChunkMissing, type(None), ChunkMissing]
    assert [bytes(read.into) for read in reads if read.key != GONE] == [b"1111", b"2222", b"1111", b"1111"]


async def test_a_key_that_comes_again_is_stored_once_from_its_last_place():
    service = Service()
    writes = [Write(key, memoryview(bytes([place]) * 4)) for place, key in enumerate((ONE, TWO, ONE))]
    assert await store_each_once(writes, service.store) == [None] * 3
    assert sorted(service.asked) == sorted([ONE, TWO])
    assert service.held == {TWO: bytes([1]) * 4, ONE: bytes([2]) * 4}
