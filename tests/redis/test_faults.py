"""Whatever becomes of a server or of the way to it: no wrong byte, no row that stays lent, and hits when it is back."""

import asyncio
import gc
import signal
import threading
import time

import pytest

from kvtier.backend import SEAL_BYTES, Abandoned, BackendUnavailable, OffloadKey, chunk_hash, lending
from kvtier.errors import cause_of
from kvtier.testing.conformance import Lender, key_of, keys_of, label
from tests.redis.conftest import CHUNK_BYTES
from tests.redis.servers import PATIENCE_S, RedisServer, until
from tests.remote.tiers import recalled, recovers, used_again

VALUE_BYTES = CHUNK_BYTES + SEAL_BYTES
QUICK = {"timeout_s": 1.0, "connect_timeout_s": 1.0, "retry_s": "1ms"}  # Not a bound: what these tests wait for.


def names_of(server: RedisServer, prefix: str, key: OffloadKey) -> list[bytes]:
    return server.ask("KEYS", f"{prefix}*{chunk_hash(key).hex()}.bin")


def name_of(server: RedisServer, prefix: str, key: OffloadKey) -> bytes:
    (name,) = names_of(server, prefix, key)
    return name


# What somebody has put under a chunk's name.


@pytest.mark.parametrize("at", [0, CHUNK_BYTES, VALUE_BYTES - 1])
async def test_a_flipped_byte_is_corrupt_and_is_deleted(opened, server, prefix, lender, at) -> None:
    tier, keys = await opened(server.address), keys_of(3)
    await lender.keep(tier, keys)
    name = name_of(server, prefix, keys[1])
    byte = server.ask("GETRANGE", name, at, at)
    server.ask("SETRANGE", name, at, bytes([byte[0] ^ 1]))
    assert await lender.recall(tier, keys) == [label(keys[0]), "ChunkCorrupt", label(keys[2])]
    assert await tier.probe(keys) == [True, False, True]
    assert sum(total for name, total in tier.counts().items() if name.startswith("corrupt_")) == 1


@pytest.mark.parametrize("length", [0, CHUNK_BYTES, VALUE_BYTES - 1, VALUE_BYTES + 1, 20 << 20])
async def test_a_value_of_another_length_is_corrupt_and_costs_its_siblings_nothing(
    opened, server, prefix, lender, length
) -> None:
    tier, keys = await opened(server.address), keys_of(40)
    await lender.keep(tier, keys)
    for key in keys[1:3]:
        server.ask("SET", name_of(server, prefix, key), bytes(length))
    whole = [label(key) for key in keys]
    assert await lender.recall(tier, keys) == [whole[0], "ChunkCorrupt", "ChunkCorrupt", *whole[3:]]
    assert tier.counts()["corrupt_length"] == 2
    await lender.keep(tier, keys, version=1)
    assert await lender.recall(tier, keys) == [label(key, 1) for key in keys]


@pytest.mark.parametrize("words", [["SET", bytes(VALUE_BYTES)], ["RPUSH", b"a"], ["HSET", b"a", b"b"]])
async def test_somebody_elses_value_is_corrupt_and_is_replaced(opened, server, prefix, lender, words) -> None:
    tier, key = await opened(server.address), key_of(1)
    await lender.keep(tier, [key])
    name = name_of(server, prefix, key)
    server.ask("DEL", name)
    server.ask(words[0], name, *words[1:])
    assert await lender.recall(tier, [key]) == ["ChunkCorrupt"]
    assert tier.counts() == {"corrupt_foreign": 1}
    await lender.keep(tier, [key])
    assert await lender.recall(tier, [key]) == [label(key)]


async def test_another_keys_value_is_not_taken_for_this_ones(opened, server, prefix, lender) -> None:
    tier, keys = await opened(server.address), keys_of(2)
    await lender.keep(tier, keys)
    one, other = (name_of(server, prefix, key) for key in keys)
    server.ask("SET", one, server.ask("GET", other))
    assert await lender.recall(tier, keys) == ["ChunkCorrupt", label(keys[1])]
    assert tier.counts() == {"corrupt_swapped": 1}


async def test_two_lengths_of_rows_share_a_server_and_never_meet(opened, server, lender) -> None:
    tier, longer = await opened(server.address), await opened(server.address, chunk_bytes=2 * CHUNK_BYTES)
    keys, twice = keys_of(2), Lender(2 * CHUNK_BYTES)
    await lender.keep(tier, keys)
    await twice.keep(longer, keys, version=1)
    # The namespace of these tests has no length of rows, an engine's has: here it is the seal that finds it.
    assert await lender.recall(tier, keys) == ["ChunkCorrupt"] * 2
    twice.take_back()


async def test_a_tier_without_the_key_misses_and_deletes_nothing(opened, server, monkeypatch, lender) -> None:
    monkeypatch.setenv("KVTIER_TEST_OLD", "11" * 32)
    monkeypatch.setenv("KVTIER_TEST_NEW", "22" * 32)
    monkeypatch.setenv("KVTIER_TEST_BOTH", "22" * 32 + "\n" + "11" * 32)
    cipher = {"seal": "aes-256-gcm"}
    old, new, both = [
        await opened(server.address, seal_key_env=f"KVTIER_TEST_{which}", **cipher) for which in ("OLD", "NEW", "BOTH")
    ]
    plain, keys = await opened(server.address), keys_of(2)
    await lender.keep(old, keys)
    assert await lender.recall(new, keys) == ["ChunkMissing"] * 2
    assert await lender.recall(plain, keys) == ["ChunkMissing"] * 2
    assert (new.counts(), plain.counts()) == ({"sealed_key": 2}, {"sealed_kind": 2})
    assert await lender.recall(both, keys) == await lender.recall(old, keys) == [label(key) for key in keys]


# What a server says.


async def test_a_full_server_is_no_space_and_goes_on_giving(opened, own_server, lender) -> None:
    server = own_server("--maxmemory", "4mb", "--maxmemory-policy", "noeviction")
    tier, keys = await opened(server.address), keys_of(400)
    outcomes = [type(outcome).__name__ for outcome in await tier.store(lender.writes(keys))]
    assert set(outcomes) == {"NoneType", "NoSpace"}
    assert tier.counts() == {"no_room": outcomes.count("NoSpace")}
    stored = [key for key, outcome in zip(keys, outcomes, strict=True) if outcome == "NoneType"]
    assert await lender.recall(tier, stored) == [label(key) for key in stored]


async def test_a_server_that_evicts_keeps_what_was_stored_last(opened, own_server, lender) -> None:
    server = own_server("--maxmemory", "4mb", "--maxmemory-policy", "allkeys-lru")
    tier, keys = await opened(server.address, lanes=1), keys_of(400)
    await lender.keep(tier, keys)
    assert await tier.probe(keys[-1:]) == [True]
    told = await lender.recall(tier, keys)
    assert all(chunk in ("ChunkMissing", label(key)) for key, chunk in zip(keys, told, strict=True))
    assert told.count("ChunkMissing") > 100


async def test_chunks_go_when_their_time_is_over(opened, server, prefix, lender) -> None:
    tier, key = await opened(server.address, ttl_s="1h"), key_of(1)
    await lender.keep(tier, [key])
    name = name_of(server, prefix, key)
    assert 3_500_000 < server.ask("PTTL", name) <= 3_600_000
    server.ask("PEXPIRE", name, 1)
    until(lambda: not server.ask("EXISTS", name))
    assert await lender.recall(tier, [key]) == ["ChunkMissing"]


async def test_a_server_that_became_a_replica_is_away_until_it_is_none(opened, own_server, lender) -> None:
    server, keys = own_server(), keys_of(3)
    tier = await opened(server.address, **QUICK)
    await lender.keep(tier, keys)
    server.ask("REPLICAOF", "127.0.0.1", "1")
    with pytest.raises(BackendUnavailable, match="READONLY"):
        await tier.store(lender.writes(keys))
    server.ask("REPLICAOF", "NO", "ONE")
    await recovers(tier, lender, keys)


async def test_a_tier_that_cannot_start_its_threads_leaves_none(opened, server, monkeypatch) -> None:
    """Those for stores are the last."""
    before, start = set(threading.enumerate()), lending.start_thread

    def started(thread: threading.Thread) -> None:
        if "-store-" in thread.name:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(lending, "start_thread", started)
    with pytest.raises(RuntimeError, match="can't start"):
        await opened(server.address)
    for thread in set(threading.enumerate()) - before:
        thread.join(PATIENCE_S)
        assert not thread.is_alive(), thread.name


async def test_a_server_with_another_password_is_away_until_ours_is_right(
    opened, own_server, lender, monkeypatch
) -> None:
    monkeypatch.setenv("KVTIER_TEST_PASSWORD", "one")
    server, keys = own_server("--requirepass", "one", password="one"), keys_of(3)
    tier = await opened(server.address, password_env="KVTIER_TEST_PASSWORD", **QUICK)
    with server.client() as client:
        client.config_set("requirepass", "two")
        client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        with pytest.raises(BackendUnavailable, match="WRONGPASS"):
            await tier.store(lender.writes(keys))
        client.config_set("requirepass", "one")
    await recovers(tier, lender, keys)


async def test_a_server_with_too_many_clients_is_away_until_there_are_fewer(opened, own_server, lender) -> None:
    server, keys = own_server("--maxclients", "2"), keys_of(3)
    tier = await opened(server.address, **QUICK)  # It keeps a connection,
    with server.client() as client, server.client() as another:
        client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")  # loses it,
        another.ping()  # and somebody else has its place.
        with pytest.raises(BackendUnavailable, match="max number of clients"):
            await tier.store(lender.writes(keys))
    await recovers(tier, lender, keys)


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
async def test_each_error_of_a_server_has_its_outcome(opened, proxy, lender, answer, told) -> None:
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
async def test_a_server_that_speaks_otherwise_is_away(opened, proxy, lender, answer) -> None:
    tier, key = await opened(proxy.address, **QUICK), key_of(1)
    await lender.keep(tier, [key])
    proxy.reply = lambda passed: answer
    reads = lender.reads([key])
    with pytest.raises(BackendUnavailable):
        await tier.load(reads)
    with pytest.raises(BackendUnavailable):
        await tier.store(lender.writes([key]))
    await used_again(lender, [reads[0].into])
    proxy.reply = lambda passed: passed
    await recovers(tier, lender, [key])


async def test_a_reply_that_nobody_asked_for_answers_nothing(opened, proxy, lender) -> None:
    """Neither one that has been read with another's, nor one that comes when the connection is idle."""
    tier, keys = await opened(proxy.address), keys_of(4)
    for surplus in (b":1\r\n", b"+OK\r\n", b"$-1\r\n"):
        proxy.reply = lambda passed, surplus=surplus: passed + surplus
        assert list(await tier.probe(keys[:1])) == [False]
        proxy.reply = lambda passed: passed
        assert list(await tier.probe(keys)) == [False] * 4
    await lender.keep(tier, keys)
    assert await lender.recall(tier, keys) == [label(key) for key in keys]


# What becomes of a server, and of the way to it.


async def test_a_refused_connection_is_an_unavailable_tier_until_somebody_listens(opened, proxy, lender) -> None:
    tier, keys = await opened(proxy.address, **QUICK), keys_of(8)
    await lender.keep(tier, keys)
    proxy.refuse()
    reads, writes = lender.reads(keys), lender.writes(keys)
    for call, given in ((tier.load, reads), (tier.store, writes), (tier.probe, keys), (tier.delete, keys)):
        with pytest.raises(BackendUnavailable, match="refused"):
            await call(given)
    await used_again(lender, [*(read.into for read in reads), *(write.row for write in writes)])
    proxy.listen()
    await recovers(tier, lender, keys)


async def test_a_connection_reset_while_idle_costs_nothing(opened, proxy, lender) -> None:
    tier, keys = await opened(proxy.address), keys_of(8)
    await lender.keep(tier, keys)
    proxy.reset()
    assert await lender.recall(tier, keys) == [label(key) for key in keys]
    proxy.reset()
    await lender.keep(tier, keys, version=1)
    assert await lender.recall(tier, keys) == [label(key, 1) for key in keys]


@pytest.mark.parametrize("passed_bytes", [0, 3, VALUE_BYTES // 2, 5 * VALUE_BYTES + 7])
async def test_a_reply_cut_in_the_middle_fails_what_it_had_not_answered(opened, proxy, lender, passed_bytes) -> None:
    tier, keys = await opened(proxy.address, lanes=1, **QUICK), keys_of(8)
    await lender.keep(tier, keys)
    left = passed_bytes

    def cut(passed: bytes) -> bytes | None:
        nonlocal left
        if left < len(passed):
            return None
        left -= len(passed)
        return passed

    proxy.reply = cut
    reads = lender.reads(keys)
    try:
        told = lender.told(reads, await tier.load(reads))
        assert set(told) - {"TransferFailed"} <= {label(key) for key in keys}
        assert told == [
            chunk if chunk == "TransferFailed" else label(key) for key, chunk in zip(keys, told, strict=True)
        ]
    except BackendUnavailable:
        pass
    await used_again(lender, [read.into for read in reads])
    proxy.reply = lambda passed: passed
    await recovers(tier, lender, keys)


async def test_a_byte_flipped_on_the_way_is_never_believed(opened, proxy, lender) -> None:
    tier, keys = await opened(proxy.address, **QUICK), keys_of(8)
    for turn in range(0, 40, 2):
        proxy.reply = lambda passed: passed
        await recovers(tier, lender, keys)
        seen = 0

        def flip(passed: bytes, turn: int = turn) -> bytes:
            nonlocal seen
            at, seen = turn * 3_331 - seen, seen + len(passed)
            if not 0 <= at < len(passed):
                return passed
            return passed[:at] + bytes([passed[at] ^ 0x10]) + passed[at + 1 :]

        proxy.reply = flip
        reads = lender.reads(keys)
        try:
            told = lender.told(reads, await tier.load(reads))
        except BackendUnavailable:
            continue
        for key, chunk in zip(keys, told, strict=True):
            assert chunk in (label(key), "ChunkCorrupt", "ChunkMissing", "TransferFailed"), chunk


async def test_a_server_that_hangs_fails_calls_and_no_byte_comes_late(opened, own_server, lender) -> None:
    server, keys = own_server(), keys_of(64)
    tier = await opened(server.address, **QUICK)
    await lender.keep(tier, keys)
    server.signal(signal.SIGSTOP)
    reads, writes = lender.reads(keys), lender.writes(keys, version=1)
    for call, given in ((tier.load, reads), (tier.store, writes), (tier.probe, keys), (tier.delete, keys)):
        with pytest.raises(BackendUnavailable) as failed:
            await call(given)
        assert cause_of(failed.value) == "ETIMEDOUT"
    await used_again(lender, [*(read.into for read in reads), *(write.row for write in writes)])
    server.signal(signal.SIGCONT)
    await used_again(lender, [*(read.into for read in reads), *(write.row for write in writes)])
    told = await recalled(tier, lender, keys)
    assert all(chunk in (label(key), label(key, 1)) for key, chunk in zip(keys, told, strict=True)), told
    await recovers(tier, lender, keys)


async def test_a_reply_that_drips_is_over_in_time(opened, proxy, lender) -> None:
    proxy.piece_bytes = 512
    tier, keys = await opened(proxy.address, **QUICK), keys_of(4)
    await lender.keep(tier, keys)
    proxy.reply = _drip
    reads = lender.reads(keys)
    with pytest.raises(BackendUnavailable, match="in time"):
        await tier.load(reads)
    await used_again(lender, [read.into for read in reads])


def _drip(passed: bytes) -> bytes:
    time.sleep(0.05)  # Between pieces: each comes well within every time-out of its own.
    return passed


async def test_nobody_waits_for_a_server_that_is_known_to_hang(opened, server, own_server, lender) -> None:
    """Of two servers one hangs: its chunks fail, the other's go on, and it is tried by one thread at a time."""
    other = own_server()
    tier, keys = await opened(server.address, other.address, **QUICK | {"retry_s": "1h"}), keys_of(32)
    await lender.keep(tier, keys)
    other.signal(signal.SIGSTOP)
    reads = lender.reads(keys)
    outcomes = await tier.load(reads)
    told = lender.told(reads, outcomes)
    assert set(told) - {"TransferFailed"} < {label(key) for key in keys}
    assert {cause_of(outcome) for outcome in outcomes if outcome is not None} == {"ETIMEDOUT"}
    before = tier.counts().get("unreachable", 0)
    again = await lender.recall(tier, keys)
    assert again == told
    assert tier.counts()["unreachable"] - before == told.count("TransferFailed")
    other.signal(signal.SIGCONT)


async def test_a_call_that_meets_several_hung_servers_waits_for_its_time_once(opened, own_server, lender) -> None:
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


async def test_a_name_that_nobody_resolves_holds_no_row(opened, proxy, names_hang, lender) -> None:
    tier, keys = await opened(f"localhost:{proxy.port}", **QUICK), keys_of(8)
    await lender.keep(tier, keys)
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


async def test_a_killed_server_costs_its_chunks_and_is_used_again_when_it_is_back(opened, own_server, lender) -> None:
    server, keys = own_server(), keys_of(16)
    tier = await opened(server.address, **QUICK)
    await lender.keep(tier, keys)
    loads = [asyncio.create_task(tier.load(lender.reads(keys))) for _ in range(4)]
    await asyncio.sleep(0)
    server.kill()
    for load in loads:
        try:
            outcomes = await load
        except BackendUnavailable:
            continue
        assert {type(outcome).__name__ for outcome in outcomes} <= {"NoneType", "TransferFailed"}
    with pytest.raises(BackendUnavailable):
        await tier.load(lender.reads(keys))
    server.start()
    assert await recalled(tier, lender, keys) == ["ChunkMissing"] * 16
    await recovers(tier, lender, keys)


async def test_a_call_that_needs_another_request_is_answered_while_the_tier_closes(
    opened, server, prefix, lender
) -> None:
    tier, keys = await opened(server.address), keys_of(3)
    await lender.keep(tier, keys)
    server.ask("SETRANGE", name_of(server, prefix, keys[1]), 5, b"?")
    reads = lender.reads(keys)
    load = asyncio.create_task(tier.load(reads))
    await asyncio.sleep(0)
    assert await tier.aclose(10) == Abandoned(0)
    assert lender.told(reads, await load) == [label(keys[0]), "ChunkCorrupt", label(keys[2])]
    assert names_of(server, prefix, keys[1]) == []


def connections(server: RedisServer) -> int:
    return server.ask("INFO", "clients")["connected_clients"] - 1  # The one that asks.


@pytest.mark.parametrize("turns", [0, 1, 2, 4])
async def test_opening_or_closing_that_is_cancelled_leaves_no_connection(opened, own_server, lender, turns) -> None:
    server = own_server()
    opening = asyncio.create_task(opened(server.address))
    for _ in range(turns):
        await asyncio.sleep(0)
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    gc.collect()  # What was left open would be closed by it, with a warning that fails the test.
    until(lambda: connections(server) == 0)
    tier, keys = await opened(server.address, timeout_s=600), keys_of(8)
    await lender.keep(tier, keys)
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


async def test_closing_ends_calls_that_hang(opened, own_server, lender) -> None:
    server, keys = own_server(), keys_of(8)
    tier = await opened(server.address, timeout_s=600)
    await lender.keep(tier, keys)
    server.signal(signal.SIGSTOP)
    reads = lender.reads(keys)
    load = asyncio.create_task(tier.load(reads))
    await asyncio.sleep(0.05)
    assert await tier.aclose(0.05) == Abandoned(1)
    with pytest.raises(BackendUnavailable):
        await load
    await used_again(lender, [read.into for read in reads])
    assert await tier.aclose(10) == Abandoned(0)
    server.signal(signal.SIGCONT)


async def test_a_cancelled_call_to_a_hung_server_ends_with_its_time_out(opened, own_server, lender) -> None:
    server, keys = own_server(), keys_of(8)
    tier = await opened(server.address, **QUICK)
    await lender.keep(tier, keys)
    server.signal(signal.SIGSTOP)
    reads = lender.reads(keys)
    load = asyncio.create_task(tier.load(reads))
    await asyncio.sleep(0.05)
    load.cancel()
    with pytest.raises(asyncio.CancelledError):
        await load
    await used_again(lender, [read.into for read in reads])
    server.signal(signal.SIGCONT)
    await recovers(tier, lender, keys)
