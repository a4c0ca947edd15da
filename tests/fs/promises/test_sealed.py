"""With `aes-256-gcm`, nobody without the key reads a chunk on the disk, or makes one that is believed."""

import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from xxhash import xxh3_64_intdigest

from kvtier.backend.namespace import FileMapper
from kvtier.errors import ConfigError
from kvtier.testing.conformance import Lender
from kvtier.testing.conformance.lender import key_of, keys_of, label
from kvtier_backends.fs import FsOptions
from kvtier_backends.fs.disk.footer import FOOTER_BYTES, read_footer, write_footer
from tests.fs.conftest import ROW_BYTES, SECRETS, scanned, taken_bytes

OLD, NEW = "11" * 32, "22" * 32
SEALED = {"seal": "aes-256-gcm", "seal_key_env": SECRETS}
KEYS = keys_of(4)
WHOLE = [label(key) for key in KEYS]
MISSES = ["ChunkMissing"] * len(KEYS)
PIECE_BYTES = 32

pytestmark = pytest.mark.parametrize("layout", ["files", "segments"])


@pytest.fixture
def give(monkeypatch) -> Callable[..., dict[str, str]]:
    """Set the secrets; return the options of a tier that reads them."""

    def give(*secrets: str) -> dict[str, str]:
        monkeypatch.setenv(SECRETS, "\n".join(secrets))
        return SEALED

    return give


def contents(root: Path) -> dict[Path, bytes]:
    """Return the files of chunks."""
    found = [*root.rglob("*.bin"), *root.rglob("*.seg")]
    return {path: path.read_bytes() for path in found}


async def test_nothing_of_a_row_is_on_the_disk(open_tier, lender, root, give, layout) -> None:
    tier = await open_tier(layout=layout, capacity_bytes="1MiB", **give(NEW))
    await lender.keep(tier, KEYS)
    await lender.keep(tier, KEYS)
    stored = b"".join(contents(root).values())
    rows = b"".join(lender.chunk(key) for key in KEYS)
    assert not [at for at in range(0, len(rows), PIECE_BYTES) if rows[at : at + PIECE_BYTES] in stored]


async def test_without_the_key_chunks_are_misses_and_with_it_they_are_there_again(
    open_tier, lender, root, give, layout
) -> None:
    where = {"layout": layout, "capacity_bytes": "1MiB"}
    await (await stored(open_tier, lender, **where, **give(OLD))).aclose(10)
    before = contents(root)
    other = await open_tier(**where, **give(NEW))
    assert await lender.recall(other, KEYS) == MISSES
    assert (other.counters().sealed_key, other.counters().corrupt) == (4, {})
    await other.aclose(10)
    assert contents(root) == before
    assert await lender.recall(await open_tier(**where, **give(OLD)), KEYS) == WHOLE


async def test_keys_are_rotated_without_losing_a_chunk(open_tier, lender, give, layout) -> None:
    where = {"layout": layout, "capacity_bytes": "1MiB"}
    await (await stored(open_tier, lender, **where, **give(OLD))).aclose(10)
    both = await open_tier(**where, **give(NEW, OLD))
    assert await lender.recall(both, KEYS) == WHOLE
    await lender.keep(both, KEYS[:2], version=1)
    await both.aclose(10)
    after = await open_tier(**where, **give(NEW))
    assert await lender.recall(after, KEYS) == [label(KEYS[0], 1), label(KEYS[1], 1), "ChunkMissing", "ChunkMissing"]
    assert after.counters().sealed_key == 2


@pytest.mark.parametrize("sealed_first", [False, True])
async def test_what_was_stored_with_the_other_kind_of_seal_is_a_miss_until_it_is_stored_again(
    open_tier, lender, root, give, layout, sealed_first
) -> None:
    naming = {"naming": "flat"} if layout == "files" else {}
    kinds = [{}, give(NEW)]
    first, second = (
        {"layout": layout, "capacity_bytes": "1MiB", **naming, **seal} for seal in kinds[:: 1 - 2 * sealed_first]
    )
    await (await stored(open_tier, lender, **first)).aclose(10)
    before = contents(root)
    tier = await open_tier(**second)
    assert await lender.recall(tier, KEYS) == MISSES
    assert (tier.counters().sealed_kind, tier.counters().corrupt) == (4, {})
    assert contents(root) == before
    await lender.keep(tier, KEYS, version=1)
    assert await lender.recall(tier, KEYS) == [label(key, 1) for key in KEYS]


async def test_what_is_left_alone_takes_its_room_and_goes_when_that_is_wanted(
    open_tier, lender, root, give, layout
) -> None:
    where = {"layout": layout, "capacity_bytes": "1MiB"}
    many = keys_of(30)
    tier = await open_tier(**where, **give(OLD))
    await lender.keep(tier, many)
    await tier.aclose(10)
    tier = await open_tier(**where, **give(NEW))
    await scanned(tier)
    assert set(await lender.recall(tier, many)) == {"ChunkMissing"}
    for start in range(100, 180, 10):
        await lender.keep(tier, keys_of(10, start=start))
        assert taken_bytes(root) <= 1 << 20
    assert await lender.recall(tier, keys_of(10, start=170)) == [label(key) for key in keys_of(10, start=170)]


async def test_what_somebody_without_the_key_has_made_is_not_believed(
    open_tier, lender, place_of, give, layout
) -> None:
    """Checksums are right in each: a changed row, another key's chunk, an older seal on a newer row."""
    tier = await open_tier(layout=layout, capacity_bytes="1MiB", **give(NEW))
    await lender.keep(tier, KEYS)
    chunks = [place_of(key).read() for key in KEYS]
    forged = [
        (b"?" * ROW_BYTES, read_footer(memoryview(chunks[0])[ROW_BYTES:])),
        (chunks[2][:ROW_BYTES], read_footer(memoryview(chunks[2])[ROW_BYTES:])._replace(key=KEYS[1])),
        (chunks[3][:ROW_BYTES], read_footer(memoryview(chunks[2])[ROW_BYTES:])),
    ]
    for key, (row, footer) in zip(KEYS, forged, strict=False):
        page = memoryview(bytearray(FOOTER_BYTES))
        write_footer(page, footer._replace(payload_checksum=xxh3_64_intdigest(row)))
        place_of(key).overwrite(0, row + bytes(page))
    assert await lender.recall(tier, KEYS) == [*["ChunkCorrupt"] * 3, label(KEYS[3])]
    assert tier.counters().corrupt == {"payload": 2, "swapped": 1}


async def test_a_seal_of_a_later_version_is_a_miss_and_left_alone(
    open_tier, lender, root, place_of, give, layout
) -> None:
    tier = await open_tier(layout=layout, capacity_bytes="1MiB", **give(NEW))
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
    assert await lender.recall(tier, KEYS) == ["ChunkMissing", *WHOLE[1:]]
    assert (tier.counters().other_version, tier.counters().corrupt) == (1, {})
    assert contents(root) == before


async def test_what_vllm_looks_for_is_never_encrypted(open_tier, lender, root, mapper, give, layout) -> None:
    """It reads a row's length from a file of its own name, and believes it."""
    await stored(open_tier, lender, layout=layout, capacity_bytes="1MiB", **give(NEW))
    assert not (root / mapper.chunks_folder).exists()
    with pytest.raises(ConfigError, match=r"^naming: 'vllm' given, 'flat' accepted with seal = 'aes-256-gcm'"):
        FsOptions(root=str(root), naming="vllm", seal="aes-256-gcm", seal_key_env=SECRETS)


async def test_a_row_without_a_footer_is_never_accepted_by_who_has_keys(
    open_tier, lender, root, mapper, give, layout
) -> None:
    with pytest.raises(ConfigError, match=r"^unverified: 'accept' given, 'refuse' accepted with seal = 'aes-256-gcm'"):
        FsOptions(root=str(root), unverified="accept", seal="aes-256-gcm", seal_key_env=SECRETS)
    if layout == "files":
        path = root / FileMapper(mapper.namespace, "flat").name(KEYS[0])
        path.parent.mkdir(parents=True)
        path.write_bytes(lender.chunk(KEYS[0]))
        tier = await open_tier(layout=layout, **give(NEW))
        assert await lender.recall(tier, KEYS) == MISSES
        assert tier.counters().unverified_refused == 1


async def test_keys_that_are_not_there_are_a_mistake_of_the_configuration_and_leave_nothing(
    open_tier, root, monkeypatch, layout
) -> None:
    monkeypatch.delenv(SECRETS, raising=False)
    with pytest.raises(ConfigError, match=r"^seal_key_env: the environment has no variable"):
        await open_tier(layout=layout, **SEALED)
    assert not root.exists()


async def test_the_longest_key_has_a_place_beside_the_seal(open_tier, lender, give, layout) -> None:
    tier = await open_tier(layout=layout, capacity_bytes="1MiB", **give(NEW))
    for length in (3_889, 3_888, 4_016, 100):
        key = type(key_of(0))(b"k" * length)
        outcome = (await tier.store(lender.writes([key])))[0]
        assert (outcome is None) == (length <= (3_888 if layout == "segments" else 119))


async def stored(open_tier, lender: Lender, **options: object):
    tier = await open_tier(**options)
    await lender.keep(tier, KEYS)
    assert await lender.recall(tier, KEYS) == WHOLE
    return tier
