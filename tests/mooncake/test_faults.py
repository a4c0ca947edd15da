"""Faults of a pool: no wrong byte, no row that stays lent or is written later, and hits afterwards."""

import asyncio
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pytest

from kvtier.backend import Abandoned, BackendUnavailable, OffloadKey, TransferFailed
from kvtier.engine.tier import CAUSES
from kvtier.errors import cause_of
from kvtier.testing.conformance import Lender, key_of, keys_of, label
from kvtier_backends.mooncake.backend import ASKERS, MooncakeBackend
from kvtier_backends.mooncake.client import PoolClient
from tests.mooncake.conftest import TIMEOUT_S
from tests.mooncake.pools import PATIENCE_S, Pool, Program, until
from tests.remote.tiers import recalled, recovers

LEAVER = Path(__file__).with_name("leaver.py")
LARGE_BYTES = 1 << 20  # What takes more than one read of a socket.


@pytest.fixture
def entered(monkeypatch):
    counts = Counter[str]()

    def counted(name):
        call = getattr(PoolClient, name)

        def count(*arguments):
            counts[name] += 1
            return call(*arguments)

        return count

    for name in ("exist", "get", "put"):
        monkeypatch.setattr(PoolClient, name, counted(name))
    return counts


class Alone(NamedTuple):
    pool: Pool
    owner: Program
    tier: MooncakeBackend
    keys: list[OffloadKey]


@pytest.fixture
def alone(own_pool, opened_alone, lender):
    async def alone(chunks=64, *, client_ttl_s=10, owners=1, **fields):
        pool = own_pool(client_ttl_s=client_ttl_s)
        owner, *_ = [pool.add_owner() for _ in range(owners)]
        tier, keys = await opened_alone(pool, **fields), keys_of(chunks)
        await recovers(tier, lender, keys)  # A machine may stall for longer than the tests' time-outs.
        return Alone(pool, owner, tier, keys)

    return alone


async def test_a_mixture_beside_stores_is_never_taken_for_a_chunk(opened, lender):
    """And what was stored is there in the end: a mixture is no reason to remove what is just being stored."""
    lender = Lender(LARGE_BYTES)
    tier, keys = await opened(chunk_bytes=LARGE_BYTES), keys_of(8)
    versions = [lender.writes(keys, version) for version in range(2)]
    assert list(await tier.store(versions[0])) == [None] * 8
    right = [{label(key), label(key, 1), "ChunkMissing"} for key in keys]
    stored = 0
    for turn in range(40):
        storing = asyncio.create_task(tier.store(versions[turn % 2]))
        while not storing.done():
            found = await lender.recall(tier, keys)
            assert all(one in any_of for one, any_of in zip(found, right, strict=True)), found
        outcomes = storing.result()
        assert all(outcome is None or isinstance(outcome, TransferFailed) for outcome in outcomes), outcomes
        stored += outcomes.count(None)
    assert stored > 0
    assert not any(name.startswith("corrupt_") for name in tier.counts()), tier.counts()
    await lender.keep(tier, keys, version=2)
    assert await lender.recall(tier, keys) == [label(key, 2) for key in keys]
    lender.take_back()


async def test_a_killed_owner_costs_its_chunks_and_another_one_is_used(alone, lender):
    pool, owner, tier, keys = await alone(client_ttl_s=2)
    owner.kill()
    assert set(await lender.recall(tier, keys)) <= {"TransferFailed", "ChunkMissing"}  # The latter once it is dropped.
    assert tier.counts()["transfers_failed"] <= 32, "one part each lane was tried, and no other"
    again = [outcome for outcome in await tier.load(lender.reads(keys)) if isinstance(outcome, TransferFailed)]
    assert {cause_of(outcome) for outcome in again} <= {"EIO", "ETIMEDOUT"}
    pool.add_owner()
    await recovers(tier, lender, keys)


@pytest.mark.promise("One server or owner of several is gone")
@pytest.mark.parametrize("replicas", [1, 2])
async def test_a_dead_owner_of_two_costs_its_share_or_with_replicas_nothing(alone, lender, replicas):
    pool, owner, tier, keys = await alone(client_ttl_s=2, owners=2, replicas=replicas)
    owner.kill()
    until(lambda: len(pool.segments()) == 1)
    found = await lender.recall(tier, keys)
    assert all(one in (label(key), "ChunkMissing", "TransferFailed") for one, key in zip(found, keys, strict=True))
    whole = sum(one == label(key) for one, key in zip(found, keys, strict=True))
    assert whole == 64 if replicas == 2 else 0 < whole < 64
    await recovers(tier, lender, keys)


@pytest.mark.parametrize("operation", ["load", "store"])
async def test_an_owner_that_hangs_fails_calls_in_time_and_no_row_is_used_later(alone, lender, operation):
    _, owner, tier, keys = await alone()
    chunks = lender.reads(keys) if operation == "load" else lender.writes(keys, version=1)
    owner.signal(signal.SIGSTOP)
    outcomes = await getattr(tier, operation)(chunks)
    assert {type(outcome) for outcome in outcomes} == {TransferFailed}
    assert {cause_of(outcome) for outcome in outcomes} == {"ETIMEDOUT"}
    rows = [row for _, row in chunks]
    for row in rows:
        row[:] = lender.chunk(key_of(99))
    staging = (tier._loads if operation == "load" else tier._stores).staging
    retired = staging.retired
    assert retired > 0
    owner.signal(signal.SIGCONT)
    assert await tier._threads.ended(time.monotonic() + PATIENCE_S)
    found, right = await recalled(tier, lender, keys), [(label(key), label(key, 1)) for key in keys]
    assert all(one in (*any_of, "ChunkMissing", "ChunkCorrupt") for one, any_of in zip(found, right, strict=True))
    await recovers(tier, lender, keys)
    assert [lender.identify(row) for row in rows] == [label(key_of(99))] * 64
    assert staging.retired == retired, "what goes well retires nothing"
    assert lender.guards_are_intact()


async def test_a_hung_call_delays_no_load_of_other_chunks(alone, opened_alone, lender):
    pool, owner, _, keys = await alone(16, client_ttl_s=60, owners=2)
    tier = await opened_alone(pool, timeout_s=0.3)
    owner.signal(signal.SIGSTOP)
    while not tier._threads._under_way:  # A stall may outlast Mooncake's own time-out, too.
        assert {type(outcome) for outcome in await tier.load(lender.reads(keys))} == {TransferFailed}
    found = [await lender.recall(tier, [key]) for key in keys]
    assert sum(one == [label(key)] for one, key in zip(found, keys, strict=True)) > 0, found
    assert all(one in ([label(key)], ["TransferFailed"]) for one, key in zip(found, keys, strict=True))
    owner.signal(signal.SIGCONT)
    await recovers(tier, lender, keys)


async def test_a_late_call_that_ends_well_after_all_gives_its_memory_back(own_pool, opened_alone, lender):
    """Its slots are retired, and as often as an owner hangs there are more of them."""
    pool, keys = own_pool(client_ttl_s=60), keys_of(16)
    owner, tier = pool.add_owner(), await opened_alone(pool, timeout_s=0.3)
    writes = lender.writes(keys)
    owner.signal(signal.SIGSTOP)
    assert {type(outcome) for outcome in await tier.store(writes)} == {TransferFailed}
    staging = tier._stores.staging
    assert any(map(any, staging._kept))
    owner.signal(signal.SIGCONT)
    assert await tier._threads.ended(time.monotonic() + PATIENCE_S)
    until(lambda: not any(map(any, staging._kept)))


async def test_a_cancelled_call_to_a_hung_owner_ends_with_its_time_out(alone, lender):
    _, owner, tier, keys = await alone()
    owner.signal(signal.SIGSTOP)
    call = asyncio.create_task(tier.load(lender.reads(keys)))
    await asyncio.sleep(0)
    call.cancel()
    await asyncio.wait({call}, timeout=PATIENCE_S)
    assert call.cancelled()
    owner.signal(signal.SIGCONT)
    await recovers(tier, lender, keys)


@pytest.mark.promise("`mooncake`: the master dies")
@pytest.mark.parametrize("hangs", [False, True])
async def test_a_master_that_is_away_is_unavailable_in_time_and_used_again(alone, lender, hangs):
    pool, _, tier, keys = await alone(20)
    if hangs:
        pool.master.signal(signal.SIGSTOP)
    else:
        pool.master.kill()
    for call in (tier.probe(keys), tier.delete(keys)):
        with pytest.raises(BackendUnavailable) as failed:
            await call
        assert cause_of(failed.value) in ({"ETIMEDOUT"} if hangs else CAUSES)
    with suppress(BackendUnavailable):
        assert set(await lender.recall(tier, keys)) == {"TransferFailed"}
    if hangs:
        pool.master.signal(signal.SIGCONT)
    else:
        pool.start_master()
    await recovers(tier, lender, keys)


async def test_waiting_calls_do_not_retry_a_master_found_dead(alone, lender, entered):
    pool, _, tier, keys = await alone(12, timeout_s=PATIENCE_S)
    pool.master.kill()
    for _ in range(2):  # Those that begin after it was found try anew.
        entered.clear()
        calls = [call for key in keys for call in (tier.load(lender.reads([key])), tier.store(lender.writes([key])))]
        outcomes = await asyncio.gather(*calls, *(tier.probe([key]) for key in keys), return_exceptions=True)
        assert {type(outcome) for outcome in outcomes} == {BackendUnavailable}, outcomes
        assert any(entered.values())
        assert entered["get"] <= 1
        assert entered["put"] <= 1
        assert entered["exist"] <= ASKERS
    assert tier._loads.staging.retired == tier._stores.staging.retired == 0
    pool.start_master()
    await recovers(tier, lender, keys)


async def test_calls_behind_a_late_call_fail_with_it(alone, lender, entered):
    _, owner, tier, keys = await alone(12, timeout_s=TIMEOUT_S / 2)
    entered.clear()
    owner.signal(signal.SIGSTOP)
    first = asyncio.create_task(tier.load(lender.reads(keys[:1])))
    while not entered["get"]:
        await asyncio.sleep(0.01)
    outcomes = await asyncio.gather(first, *(tier.load(lender.reads([key])) for key in keys[1:]))  # Have time left.
    assert ({type(outcome) for (outcome,) in outcomes}, entered["get"]) == ({TransferFailed}, 1)
    assert await tier.probe(keys) == [True] * 12, "the master is not blamed for it"
    owner.signal(signal.SIGCONT)
    await recovers(tier, lender, keys)


async def test_a_call_waits_its_time_for_a_turn_and_then_has_its_time(alone, lender, entered, monkeypatch):
    """Behind a slow client: a call with a turn in time is not late, and one without holds its rows no longer."""
    timeout_s = 4.0
    *_, tier, keys = await alone(6, timeout_s=timeout_s)
    get, began = PoolClient.get, list[float]()
    inside_s = iter([timeout_s / 2, timeout_s * 1.1])  # From the first entry on.

    def slow(*arguments):
        began.append(time.monotonic())
        time.sleep(max(0.0, began[0] + next(inside_s, 0.0) - time.monotonic()))
        return get(*arguments)

    monkeypatch.setattr(PoolClient, "get", slow)
    entered.clear()
    found = await asyncio.gather(*(lender.recall(tier, [key]) for key in keys))
    in_time = [outcome for outcome in found if outcome != ["TransferFailed"]]  # The threads decide which two.
    assert len(in_time) == 2
    assert all(outcome in ([label(key)], ["TransferFailed"]) for key, outcome in zip(keys, found, strict=True)), found
    assert (entered["get"], tier.counts()["late"]) == (2, 4)
    monkeypatch.setattr(PoolClient, "get", get)
    assert await lender.recall(tier, keys) == [label(key) for key in keys]


async def test_a_tier_without_its_master_does_not_open(own_pool, opened_alone):
    pool = own_pool()
    pool.master.kill()
    with pytest.raises(BackendUnavailable, match=f"0:tested: the master {pool.address} does not answer"):
        await opened_alone(pool)


async def test_closing_gives_up_calls_that_hang_or_wait_and_leaves_no_row(alone, lender):
    _, owner, tier, keys = await alone(timeout_s=PATIENCE_S)
    owner.signal(signal.SIGSTOP)
    calls = [asyncio.create_task(tier.load(lender.reads(keys))) for _ in range(4)]
    await asyncio.sleep(0)
    assert await tier.aclose(0) == Abandoned(0)
    for call in calls:
        assert {type(outcome) for outcome in await call} == {TransferFailed}
    assert lender.take_back()


async def test_closing_amid_a_hang_crashes_nothing(own_pool, prefix):
    """In a process that ends as the runner's does: at once. A C++ destructor would wait for nobody, and crash."""
    pool = own_pool()
    owner = pool.add_owner()
    leaver = await asyncio.create_subprocess_exec(
        sys.executable, LEAVER, pool.address, prefix, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert await leaver.stdout.readline() == b"stored\n"
    owner.signal(signal.SIGSTOP)
    leaver.stdin.write(b"go\n")
    assert await leaver.stdout.readline() == b"closed: Abandoned(transfers=0)\n"
    assert await leaver.wait() == 0
