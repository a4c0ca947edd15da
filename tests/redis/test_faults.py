"""Faults of a Redis server and of its connections: no wrong byte, no row that stays lent, and hits afterwards."""

import asyncio
import gc
import signal
import socket
import threading
from contextlib import suppress

import pytest

from kvtier.backend import SEAL_BYTES, Abandoned, BackendUnavailable, lending
from kvtier.errors import cause_of
from kvtier.testing.conformance import key_of, keys_of, label
from tests.redis.conftest import QUICK
from tests.redis.servers import PATIENCE_S, until
from tests.remote.tiers import CHUNK_BYTES, kept, recovers, used_again

NO_FAMILY = 200  # Beyond Linux's AF_MAX.


@pytest.mark.parametrize("words", [["RPUSH", b"a"], ["HSET", b"a", b"b"]])
async def test_a_value_of_another_type_is_corrupt_and_is_replaced(opened, server, stored, lender, words):
    tier, (key,) = await kept(lender, opened(server.address), 1)
    server.ask("DEL", stored.name(key))
    server.ask(words[0], stored.name(key), *words[1:])
    assert await lender.recall(tier, [key]) == ["ChunkCorrupt"]
    assert tier.counts() == {"corrupt_foreign": 1}
    await lender.keep(tier, [key])
    assert await lender.recall(tier, [key]) == [label(key)]


async def test_chunks_expire_after_their_ttl(opened, server, stored, lender):
    tier, (key,) = await kept(lender, opened(server.address, ttl_s="1h"), 1)
    name = stored.name(key)
    assert 3_500_000 < server.ask("PTTL", name) <= 3_600_000
    server.ask("PEXPIRE", name, 1)
    until(lambda: not server.ask("EXISTS", name))
    assert await lender.recall(tier, [key]) == ["ChunkMissing"]


REFUSALS = {
    "WRONGPASS": "CONFIG SET requirepass {}",
    "max number of clients|reset by peer|closed the connection": "CONFIG SET maxclients {}",  # Closed before a reply.
}


@pytest.mark.parametrize("told", REFUSALS)
async def test_a_server_that_refuses_is_unavailable_until_it_accepts(opened, own_server, lender, monkeypatch, told):
    monkeypatch.setenv("KVTIER_TEST_PASSWORD", "100")
    server, keys = own_server("--requirepass", "100", password="100"), keys_of(3)
    tier = await opened(server.address, password_env="KVTIER_TEST_PASSWORD", **QUICK)
    await lender.keep(tier, keys)
    with server.client() as client:
        client.execute_command(*REFUSALS[told].format(1).split())
        client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        with pytest.raises(BackendUnavailable, match=told):
            await tier.store(lender.writes(keys))
        client.execute_command(*REFUSALS[told].format(100).split())
    await recovers(tier, lender, keys)


async def test_a_tier_that_cannot_start_its_threads_leaves_none(opened, server, monkeypatch):
    before, start = set(threading.enumerate()), lending.start_thread

    def started(thread):
        if "-store-" in thread.name:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(lending, "start_thread", started)
    with pytest.raises(RuntimeError, match="can't start"):
        await opened(server.address)
    for thread in set(threading.enumerate()) - before:
        thread.join(PATIENCE_S)
        assert not thread.is_alive(), thread.name


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        ("OOM command not allowed when used memory > 'maxmemory'", "NoSpace"),
        ("ERR something new", "TransferFailed"),
        ("WRONGTYPE Operation against a key holding the wrong kind of value", "TransferFailed"),
        ("LOADING Redis is loading the dataset in memory", None),
        ("MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'", None),
        ("CLUSTERDOWN The cluster is down", None),
        ("READONLY You can't write against a read only replica", None),
        ("MISCONF Redis is configured to save RDB snapshots, but it is unable to persist on disk", None),
        ("NOREPLICAS Not enough good replicas to write", None),
        ("BUSY Redis is busy running a script", None),
        ("NOAUTH Authentication required", None),
        ("NOPERM this user has no permissions to run the 'set' command", None),
        ("MOVED 3999 127.0.0.1:1", None),
        ("MOVED 3999 127.0.0.1:99999", None),
        ("ASK 3999 127.0.0.1:1", None),
    ],
)
async def test_each_error_of_a_server_has_its_outcome(opened, proxy, lender, answer, told):
    """A chunk's own is its outcome; one of the whole server makes the tier unavailable, until it is over."""
    tier, key = await opened(proxy.address, **QUICK), key_of(1)
    proxy.reply = lambda passed: f"-{answer}\r\n".encode()
    if told is None:
        with pytest.raises(BackendUnavailable, match="redis.cluster://" if "3999" in answer else answer[:6]):
            await tier.store(lender.writes([key]))
    else:
        (outcome,) = await tier.store(lender.writes([key]))
        assert type(outcome).__name__ == told
        assert answer[:6] in str(outcome)
    proxy.reply = lambda passed: passed
    await recovers(tier, lender, [key])


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b":1\r\n", b"*0\r\n", b"$x\r\n", b"x" * 9_000])
async def test_a_server_of_another_protocol_is_unavailable(opened, proxy, lender, answer):
    tier, (key,) = await kept(lender, opened(proxy.address, **QUICK), 1)
    proxy.reply = lambda passed: answer
    reads = lender.reads([key])
    with pytest.raises(BackendUnavailable):
        await tier.load(reads)
    with pytest.raises(BackendUnavailable):
        await tier.store(lender.writes([key]))
    await used_again(lender, [reads[0].into])
    proxy.reply = lambda passed: passed
    await recovers(tier, lender, [key])


async def test_an_unrequested_reply_answers_nothing(opened, proxy, lender):
    tier, keys = await opened(proxy.address), keys_of(4)
    for surplus in (b":1\r\n", b"+OK\r\n", b"$-1\r\n"):
        proxy.reply = lambda passed, surplus=surplus: passed + surplus
        assert list(await tier.probe(keys[:1])) == [False]
        proxy.reply = lambda passed: passed
        assert list(await tier.probe(keys)) == [False] * 4
    await lender.keep(tier, keys)
    assert await lender.recall(tier, keys) == [label(key) for key in keys]


@pytest.mark.parametrize("passed_bytes", [3, (CHUNK_BYTES + SEAL_BYTES) // 2, 5 * (CHUNK_BYTES + SEAL_BYTES) + 7])
async def test_a_reply_cut_in_the_middle_fails_the_unanswered_chunks(opened, proxy, lender, passed_bytes):
    tier, keys = await kept(lender, opened(proxy.address, lanes=1, **QUICK), 8)
    left = passed_bytes

    def cut(passed):
        nonlocal left
        if left < len(passed):
            return None
        left -= len(passed)
        return passed

    proxy.reply = cut
    reads = lender.reads(keys)
    with suppress(BackendUnavailable):
        told = lender.told(reads, await tier.load(reads))
        assert all(chunk in (label(key), "TransferFailed") for key, chunk in zip(keys, told, strict=True))
    await used_again(lender, [read.into for read in reads])
    proxy.reply = lambda passed: passed
    await recovers(tier, lender, keys)


@pytest.mark.promise("One server or owner of several is gone")
async def test_no_call_waits_for_a_server_that_is_known_to_hang(opened, server, own_server, lender, monkeypatch):
    """Of two servers one hangs: its chunks fail, the other's go on, and it is tried by one thread at a time."""
    monkeypatch.setattr("kvtier_backends.redis.servers.RETRY_S", 3_600.0)
    other = own_server()
    tier, keys = await kept(lender, opened(server.address, other.address, **QUICK), 32)
    other.signal(signal.SIGSTOP)
    reads = lender.reads(keys)
    outcomes = await tier.load(reads)
    told = lender.told(reads, outcomes)
    assert set(told) - {"TransferFailed"} < {label(key) for key in keys}
    assert {cause_of(outcome) for outcome in outcomes if outcome is not None} == {"ETIMEDOUT"}
    before = tier.counts().get("unreachable", 0)
    again = await lender.recall(tier, keys)
    assert (again, tier.counts()["unreachable"] - before) == (told, told.count("TransferFailed"))
    other.signal(signal.SIGCONT)


async def test_a_call_that_meets_several_hung_servers_waits_for_its_time_once(opened, own_server, lender):
    """Their rows are free after `timeout_s`, however many of them hang, and though one lane asks them in turn."""
    servers, keys = [own_server() for _ in range(3)], keys_of(60)
    tier = await opened(*(server.address for server in servers), lanes=1, **QUICK)
    await lender.keep(tier, keys)
    for server in servers:
        server.signal(signal.SIGSTOP)
    with pytest.raises(BackendUnavailable):
        await tier.load(lender.reads(keys))
    assert tier.counts()["connections_lost"] == 1
    for server in servers:
        server.signal(signal.SIGCONT)
    await recovers(tier, lender, keys)


async def test_an_unresolved_name_holds_no_row(opened, proxy, names_hang, lender):
    tier, keys = await kept(lender, opened(f"localhost:{proxy.port}", **QUICK), 8)
    names_hang.clear()
    proxy.reset()
    for _ in range(3):
        reads = lender.reads(keys)
        with pytest.raises(BackendUnavailable, match=r"localhost.* resolved in time"):
            await tier.load(reads)
        await used_again(lender, [read.into for read in reads])
    assert sum("resolve" in thread.name for thread in threading.enumerate()) == 1
    names_hang.set()
    await recovers(tier, lender, keys)


async def test_an_address_of_a_family_that_the_machine_lacks_is_passed_over(opened, proxy, lender, monkeypatch):
    """A name has an IPv6 address, too, and the kernel may be without."""
    look_up = socket.getaddrinfo

    def with_another_family(*about, **more):
        found = look_up(*about, **more)
        return [(NO_FAMILY, *found[0][1:]), *found]

    monkeypatch.setattr(socket, "getaddrinfo", with_another_family)
    await lender.keep(await opened(f"localhost:{proxy.port}", **QUICK), keys_of(2))


async def test_a_call_that_needs_another_request_is_answered_while_the_tier_closes(opened, server, stored, lender):
    tier, keys = await kept(lender, opened(server.address), 3)
    server.ask("SETRANGE", stored.name(keys[1]), 5, b"?")
    reads = lender.reads(keys)
    load = asyncio.create_task(tier.load(reads))
    await asyncio.sleep(0)
    assert await tier.aclose(10) == Abandoned(0)
    assert lender.told(reads, await load) == [label(keys[0]), "ChunkCorrupt", label(keys[2])]
    assert stored.held(keys[1]) is None


def connections(server):
    return server.ask("INFO", "clients")["connected_clients"] - 1  # The one that asks.


@pytest.mark.parametrize("turns", [0, 1, 2, 4])
async def test_opening_or_closing_that_is_cancelled_leaves_no_connection(opened, own_server, lender, turns):
    server = own_server()
    opening = asyncio.create_task(opened(server.address))
    for _ in range(turns):
        await asyncio.sleep(0)
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    gc.collect()  # What was left open would be closed by it, with a warning that fails the test.
    until(lambda: connections(server) == 0)
    tier, keys = await kept(lender, opened(server.address, timeout_s=600), 8)
    server.signal(signal.SIGSTOP)
    load = asyncio.create_task(tier.load(lender.reads(keys)))
    await asyncio.sleep(0.05)
    closing = asyncio.create_task(tier.aclose(600))
    for _ in range(turns + 1):
        await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    with pytest.raises(BackendUnavailable):
        await load
    server.signal(signal.SIGCONT)
    until(lambda: connections(server) == 0)
