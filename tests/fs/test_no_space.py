"""A full disk is an answer for each chunk that does not fit, on a disk that is really full."""

from collections.abc import Callable
from pathlib import Path

import pytest

from kvtier.errors import NoSpace
from kvtier.testing.conformance import Lender
from kvtier.testing.conformance.lender import keys_of, label

CHUNKS = 48  # More than fit.


def temporaries(root: Path) -> list[Path]:
    return list(root.rglob("*.tmp"))


@pytest.mark.parametrize("limit", ["size=256k", "nr_inodes=48"])
@pytest.mark.parametrize("io", ["direct", "buffered"])
async def test_a_full_disk_refuses_what_does_not_fit_and_keeps_the_rest(
    open_tier, lender: Lender, mount: Callable[[str, str], Path], limit: str, io: str
) -> None:
    root = mount("tmpfs", limit)
    tier = await open_tier(root=str(root), io=io)
    keys = keys_of(CHUNKS)
    outcomes = list(await tier.store(lender.writes(keys)))
    assert {type(outcome) for outcome in outcomes} == {type(None), NoSpace}
    assert all("No space left on device" in str(outcome) for outcome in outcomes if outcome)
    kept = [key for key, outcome in zip(keys, outcomes, strict=True) if outcome is None]
    assert temporaries(root) == []
    assert tier.occupancy().chunks == len(kept)
    expected = [label(key) if key in kept else "BlockMissing" for key in keys]
    assert await lender.recall(tier, keys) == expected

    replaced = await tier.store(lender.writes(kept, version=1))  # Each needs its room a second time, for a moment.
    versions = [int(outcome is None) for outcome in replaced]
    assert await lender.recall(tier, kept) == [label(key, version) for key, version in zip(kept, versions, strict=True)]

    await tier.delete(kept)
    await lender.keep(tier, kept[:2])
    assert await lender.recall(tier, kept[:2]) == [label(key) for key in kept[:2]]


async def test_a_full_disk_still_serves_what_is_on_it(
    open_tier, lender: Lender, mount: Callable[[str, str], Path]
) -> None:
    root = mount("tmpfs", "size=128k")
    first = await open_tier(root=str(root))
    keys = keys_of(CHUNKS)
    outcomes = await first.store(lender.writes(keys))
    kept = [key for key, outcome in zip(keys, outcomes, strict=True) if outcome is None]
    fill(root / "ballast")
    await first.aclose(10)
    again = await open_tier(root=str(root))
    assert await lender.recall(again, kept) == [label(key) for key in kept]
    assert isinstance((await again.store(lender.writes([keys[-1]])))[0], NoSpace)


def fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file:
        assert file.write(bytes(1 << 20)) < 1 << 20
