"""With `aes-256-gcm`, nobody without the key reads a chunk on the disk, or makes one that is believed."""

import struct

import pytest
from xxhash import xxh3_64_intdigest

from kvtier.backend.namespace import FileMapper
from kvtier.errors import ConfigError
from kvtier.testing.conformance.lender import keys_of, label
from kvtier_backends.fs import FsOptions
from kvtier_backends.fs.disk.footer import FOOTER_BYTES, read_footer, write_footer
from tests.fs.conftest import ROW_BYTES, SECRETS, scanned, taken_bytes, whole

OLD, NEW = "11" * 32, "22" * 32
SEALED = {"seal": "aes-256-gcm", "seal_key_env": SECRETS}
KEYS = keys_of(4)
MISSES = ["ChunkMissing"] * len(KEYS)
PIECE_BYTES = 32


@pytest.fixture
def open_with(open_tier, monkeypatch, layout):
    """Open a tier that reads these secrets; without one, it seals by checksums."""

    async def open_with(*secrets):
        monkeypatch.setenv(SECRETS, "\n".join(secrets))
        naming = {"naming": "flat"} if layout == "files" else {}
        return await open_tier(layout=layout, capacity_bytes="1MiB", **naming, **SEALED if secrets else {})

    return open_with


@pytest.fixture
def stored_with(open_with, lender):
    async def stored_with(*secrets, keys=KEYS):
        tier = await open_with(*secrets)
        await lender.keep(tier, keys)
        assert await lender.recall(tier, keys) == whole(keys)
        await tier.aclose(10)

    return stored_with


def contents(root):
    return {str(path): path.read_bytes() for path in (*root.rglob("*.bin"), *root.rglob("*.seg"))}


async def test_nothing_of_a_row_is_on_the_disk(stored_with, lender, root):
    await stored_with(NEW)
    await stored_with(NEW)
    rows, files = [[*map(lender.chunk, KEYS)], contents(root).values()]
    in_rows, on_disk = (
        {one[at : at + PIECE_BYTES] for one in each for at in range(0, len(one), PIECE_BYTES)} for each in (rows, files)
    )
    assert len(in_rows) == len(KEYS) * ROW_BYTES / PIECE_BYTES
    assert not in_rows & on_disk


@pytest.mark.promise("It was sealed with a key that the tier lacks, or with the other kind of seal")
async def test_without_the_key_chunks_are_misses_and_with_it_hits_again(stored_with, open_with, lender, root):
    await stored_with(OLD)
    before = contents(root)
    other = await open_with(NEW)
    assert await lender.recall(other, KEYS) == MISSES
    assert (other.counters().sealed_key, other.counters().corrupt) == (4, {})
    await other.aclose(10)
    assert contents(root) == before
    assert await lender.recall(await open_with(OLD), KEYS) == whole(KEYS)


async def test_keys_are_rotated_without_losing_a_chunk(stored_with, open_with, lender):
    await stored_with(OLD)
    both = await open_with(NEW, OLD)
    assert await lender.recall(both, KEYS) == whole(KEYS)
    await lender.keep(both, KEYS[:2], version=1)
    await both.aclose(10)
    after = await open_with(NEW)
    assert await lender.recall(after, KEYS) == [*whole(KEYS[:2], 1), "ChunkMissing", "ChunkMissing"]
    assert after.counters().sealed_key == 2


@pytest.mark.promise("It was sealed with a key that the tier lacks, or with the other kind of seal")
@pytest.mark.parametrize(("first", "second"), [((), (NEW,)), ((NEW,), ())], ids=["plain first", "sealed first"])
async def test_a_chunk_of_another_seal_is_a_miss(stored_with, open_with, lender, root, first, second):
    await stored_with(*first)
    before = contents(root)
    tier = await open_with(*second)
    assert await lender.recall(tier, KEYS) == MISSES
    assert (tier.counters().sealed_kind, tier.counters().corrupt) == (4, {})
    assert contents(root) == before
    await lender.keep(tier, KEYS, version=1)
    assert await lender.recall(tier, KEYS) == whole(KEYS, 1)


async def test_what_is_left_alone_takes_room_until_that_is_wanted(stored_with, open_with, lender, root):
    await stored_with(OLD, keys=keys_of(30))
    tier = await open_with(NEW)
    await scanned(tier)
    assert set(await lender.recall(tier, keys_of(30))) == {"ChunkMissing"}
    for start in range(100, 180, 10):
        await lender.keep(tier, keys_of(10, start=start))
        assert taken_bytes(root) <= 1 << 20
    assert await lender.recall(tier, keys_of(10, start=170)) == whole(keys_of(10, start=170))


async def test_what_somebody_without_the_key_has_made_is_not_believed(open_with, lender, place_of):
    """Checksums are right in each: a changed row, another key's chunk, an older seal on a newer row."""
    tier = await open_with(NEW)
    await lender.keep(tier, KEYS)
    chunks = [place_of(key).read() for key in KEYS]
    footers = [read_footer(memoryview(chunk)[ROW_BYTES:]) for chunk in chunks]
    forged = [
        (b"?" * ROW_BYTES, footers[0]),
        (chunks[2][:ROW_BYTES], footers[2]._replace(key=KEYS[1])),
        (chunks[3][:ROW_BYTES], footers[2]),
    ]
    for key, (row, footer) in zip(KEYS, forged, strict=False):
        page = memoryview(bytearray(FOOTER_BYTES))
        write_footer(page, footer._replace(payload_checksum=xxh3_64_intdigest(row)))
        place_of(key).overwrite(0, row + bytes(page))
    assert await lender.recall(tier, KEYS) == [*["ChunkCorrupt"] * 3, label(KEYS[3])]
    assert tier.counters().corrupt == {"payload": 2, "swapped": 1}


async def test_a_seal_of_a_later_version_is_a_miss_and_left_alone(open_with, lender, root, place_of):
    tier = await open_with(NEW)
    await lender.keep(tier, KEYS)
    place = place_of(KEYS[0])
    page = memoryview(bytearray(place.read()[ROW_BYTES:]))
    footer = read_footer(page)
    seal = bytearray(footer.seal)
    seal[24] = 2
    struct.pack_into("<Q", seal, 120, xxh3_64_intdigest(seal[:120]))
    write_footer(page, footer._replace(seal=bytes(seal)))
    place.overwrite(ROW_BYTES, bytes(page))
    before = contents(root)
    assert await lender.recall(tier, KEYS) == ["ChunkMissing", *whole(KEYS[1:])]
    assert (tier.counters().other_version, tier.counters().corrupt) == (1, {})
    assert contents(root) == before


async def test_what_vllm_looks_for_is_never_encrypted(stored_with, root, mapper):
    await stored_with(NEW)
    assert not (root / mapper.chunks_folder).exists()
    with pytest.raises(ConfigError, match=r"^naming: 'vllm' given, 'flat' accepted with seal = 'aes-256-gcm'"):
        FsOptions(root=str(root), naming="vllm", **SEALED)


@pytest.mark.parametrize("layout", ["files"])
async def test_a_row_without_a_footer_is_never_accepted_by_who_has_keys(open_with, lender, root, mapper):
    with pytest.raises(ConfigError, match=r"^unverified: 'accept' given, 'refuse' accepted with seal = 'aes-256-gcm'"):
        FsOptions(root=str(root), unverified="accept", **SEALED)
    path = root / FileMapper(mapper.namespace, "flat").name(KEYS[0])
    path.parent.mkdir(parents=True)
    path.write_bytes(lender.chunk(KEYS[0]))
    tier = await open_with(NEW)
    assert await lender.recall(tier, KEYS) == MISSES
    assert tier.counters().unverified_refused == 1


async def test_missing_keys_are_refused_and_leave_nothing(open_tier, root, monkeypatch, layout):
    monkeypatch.delenv(SECRETS, raising=False)
    with pytest.raises(ConfigError, match=r"^seal_key_env: the environment has no variable"):
        await open_tier(layout=layout, **SEALED)
    assert not root.exists()
