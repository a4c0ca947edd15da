"""What outlives a tier's end, and what does not: the order of use, what nobody used, and what a day may write."""

import asyncio
import errno

import pytest

from kvtier.errors import BackendClosed
from kvtier.testing.conformance import Lender
from kvtier.testing.conformance.lender import key_of, keys_of, label
from tests.fs.conftest import MakeSystemCall

LAYOUTS = ["files", "segments"]
FILE_BYTES = 8_192 + 4_096  # A slot's, too.
CAPACITY_BYTES = {"files": 9 * (FILE_BYTES + 8_192) + 24_576, "segments": 8 * FILE_BYTES + 24_576}
DEADLINE_S = 20.0


@pytest.mark.parametrize(
    ("layout", "given"), [("files", {}), ("segments", {"checkpoint_s": 0}), ("segments", {"checkpoint_s": 1_800})]
)
async def test_a_restart_keeps_the_order_of_last_use(
    open_tier, lender: Lender, scanned, layout: str, given: dict[str, float]
) -> None:
    """Without a checkpoint, of the order of stores: that is what footers and files' times say."""
    options = {"layout": layout, "capacity_bytes": CAPACITY_BYTES[layout], **given}
    first = await open_tier(**options)
    await lender.keep(first, keys_of(4))
    await lender.keep(first, keys_of(2, start=4))
    await lender.recall(first, keys_of(2))
    assert first.occupancy().chunks == 6
    await first.aclose(DEADLINE_S)
    tier = await open_tier(**options)
    await scanned(tier)
    order = [3, 2, 5, 4, 1, 0] if given.get("checkpoint_s") else [3, 2, 1, 0, 5, 4]
    new, gone = 100, set[int]()
    while len(gone) < 3:
        await lender.keep(tier, [key_of(new)])
        new += 1
        gone = {number for number, there in enumerate(await tier.probe(keys_of(6))) if not there}
        assert gone == set(order[: len(gone)]), "more than one may go at a time"


@pytest.mark.parametrize(("layout", "listing"), [("files", "scandir"), ("segments", "listdir")])
async def test_a_store_that_waits_for_a_scan_that_hangs_ends_with_the_tier(
    open_tier, lender: Lender, system_call: MakeSystemCall, layout: str, listing: str
) -> None:
    tier = await open_tier(layout=layout)
    stuck = system_call(listing, sticks=True)  # Its scan has not begun: nobody has let it.
    await stuck.wait_entered()
    storing = asyncio.create_task(tier.store(lender.writes(keys_of(1))))
    await asyncio.sleep(0)
    assert await tier.aclose(0) == (0,)
    async with asyncio.timeout(DEADLINE_S):
        with pytest.raises(BackendClosed):
            await storing


@pytest.mark.parametrize("layout", LAYOUTS)
async def test_unused_chunks_expire(open_tier, lender: Lender, layout: str) -> None:
    tier = await open_tier(layout=layout, ttl_s=0.05)
    await lender.keep(tier, keys_of(3))
    async with asyncio.timeout(DEADLINE_S):
        while any(await tier.probe(keys_of(3))):
            await asyncio.sleep(0.01)
    assert tier.counters().expired == 3
    await lender.keep(tier, keys_of(3), version=1)


@pytest.mark.parametrize("layout", LAYOUTS)
async def test_beyond_a_days_write_budget_nothing_is_stored_and_everything_loads(
    open_tier, lender: Lender, layout: str
) -> None:
    options = {"layout": layout, "write_budget_bytes_per_day": 8 * 10 * FILE_BYTES}
    tier = await open_tier(**options)
    outcomes = list(await tier.store(lender.writes(keys_of(16))))
    assert outcomes[:10] == [None] * 10
    assert {type(outcome).__name__ for outcome in outcomes[10:]} == {"NoSpace"}
    assert all("write budget" in str(outcome) for outcome in outcomes[10:])
    assert tier.counters().refused == {"write_budget": 6}
    assert await lender.recall(tier, keys_of(10)) == [label(key) for key in keys_of(10)]
    await tier.aclose(DEADLINE_S)
    again = await open_tier(**options)
    assert type((await again.store(lender.writes(keys_of(1, 50))))[0]).__name__ == "NoSpace"


@pytest.mark.parametrize("layout", LAYOUTS)
async def test_a_write_budget_that_cannot_be_given_back_keeps_no_tier_from_closing(
    open_tier, lender: Lender, system_call: MakeSystemCall, layout: str
) -> None:
    tier = await open_tier(layout=layout, write_budget_bytes_per_day="1MiB")
    await lender.keep(tier, keys_of(1))
    refused = system_call("pwrite", error=errno.EIO)
    assert await tier.aclose(DEADLINE_S) == (0,)
    assert refused.times == 1


@pytest.mark.parametrize("layout", LAYOUTS)
async def test_a_write_budget_is_given_back_beside_the_loop(
    open_tier, lender: Lender, system_call: MakeSystemCall, layout: str
) -> None:
    tier = await open_tier(layout=layout, write_budget_bytes_per_day="1MiB")
    await lender.keep(tier, keys_of(1))
    stuck = system_call("pwrite", sticks=True)
    closing = asyncio.create_task(tier.aclose(DEADLINE_S))
    await stuck.wait_entered()
    stuck.let_go()
    assert await closing == (0,)
