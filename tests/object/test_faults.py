"""Whatever becomes of a bucket or of the way to it: no wrong byte, no row that stays lent, and hits when it is back."""

import asyncio
import base64
import gc
import signal
import threading
import urllib.request
from contextlib import aclosing
from typing import Any

import pytest
from xxhash import xxh3_64_intdigest

from kvtier.backend import (
    SEAL_BYTES,
    Abandoned,
    Added,
    BackendUnavailable,
    ConfigError,
    OffloadKey,
    Removed,
    ScanDone,
    chunk_hash,
)
from kvtier.errors import cause_of
from kvtier.testing.conformance import Lender, key_of, keys_of, label
from tests.object.conftest import CHUNK_BYTES
from tests.object.servers import S3Server
from tests.remote.servers import PATIENCE_S
from tests.remote.tiers import recalled, recovers, used_again

QUICK = {"timeout_s": 2.0, "connect_timeout_s": 2.0}  # Not a bound: what these tests wait for.
UNKNOWN = {"index_chunks": 0, "absent_ttl_s": 0}  # Every look-up asks.
SEAL = "kvtier"
VERSION_AT, SUM_BYTES = 24, 8  # In a seal; the sum is at its end.


def name_of(server: S3Server, bucket: str, key: OffloadKey) -> str:
    (name,) = [name for name in server.names(bucket) if chunk_hash(key).hex() in name]
    return name


def flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


# What somebody has put under a chunk's name.


@pytest.mark.parametrize("at", [0, CHUNK_BYTES // 2, CHUNK_BYTES - 1])
async def test_a_flipped_byte_is_corrupt_and_is_deleted(opened, server, bucket, lender, at) -> None:
    tier, keys = await opened(), keys_of(3)
    await lender.keep(tier, keys)
    name = name_of(server, bucket, keys[1])
    body, metadata = server.get(bucket, name)
    server.put(bucket, name, flipped(body, at), metadata)
    assert await lender.recall(tier, keys) == [label(keys[0]), "ChunkCorrupt", label(keys[2])]
    assert await tier.probe(keys) == [True, False, True]
    assert name not in server.names(bucket)
    assert tier.counts() == {"corrupt_payload": 1}


@pytest.mark.parametrize("at", range(0, SEAL_BYTES, 9))
async def test_a_seal_with_a_flipped_byte_is_corrupt(opened, server, bucket, lender, at) -> None:
    tier, key = await opened(), key_of(1)
    await lender.keep(tier, [key])
    name = name_of(server, bucket, key)
    body, metadata = server.get(bucket, name)
    seal = flipped(base64.b64decode(metadata[SEAL]), at)
    server.put(bucket, name, body, {SEAL: base64.b64encode(seal).decode()})
    assert await lender.recall(tier, [key]) == ["ChunkCorrupt"]


@pytest.mark.parametrize("length", [0, 1, CHUNK_BYTES - 1, CHUNK_BYTES + 1, 5 << 20])
async def test_an_object_of_another_length_is_corrupt_and_costs_its_siblings_nothing(
    opened, server, bucket, lender, length
) -> None:
    tier, keys = await opened(), keys_of(6)
    await lender.keep(tier, keys)
    name = name_of(server, bucket, keys[1])
    server.put(bucket, name, bytes(length), server.get(bucket, name)[1])
    whole = [label(key) for key in keys]
    assert await lender.recall(tier, keys) == [whole[0], "ChunkCorrupt", *whole[2:]]
    assert tier.counts()["corrupt_length"] == 1
    await lender.keep(tier, keys, version=1)
    assert await lender.recall(tier, keys) == [label(key, 1) for key in keys]


@pytest.mark.parametrize("seal", ["no base64!", "AAAA", base64.b64encode(bytes(SEAL_BYTES)).decode()])
async def test_an_object_with_a_seal_that_is_none_is_corrupt_and_is_replaced(
    opened, server, bucket, lender, seal
) -> None:
    tier, key = await opened(), key_of(1)
    await lender.keep(tier, [key])
    name = name_of(server, bucket, key)
    server.put(bucket, name, bytes(CHUNK_BYTES), {SEAL: seal})
    assert await lender.recall(tier, [key]) == ["ChunkCorrupt"]
    assert tier.counts() == {"corrupt_foreign": 1}
    await lender.keep(tier, [key])
    assert await lender.recall(tier, [key]) == [label(key)]


@pytest.mark.parametrize(("body_bytes", "more"), [(CHUNK_BYTES, b""), (CHUNK_BYTES, b"more"), (CHUNK_BYTES // 2, b"")])
async def test_an_object_of_a_later_version_is_left_alone_however_long_it_and_its_seal_are(
    opened, server, bucket, lender, body_bytes, more
) -> None:
    tier, key = await opened(), key_of(1)
    await lender.keep(tier, [key])
    name = name_of(server, bucket, key)
    seal = bytearray(base64.b64decode(server.get(bucket, name)[1][SEAL]))
    seal[VERSION_AT] += 1
    later = bytes(seal[:-SUM_BYTES]) + more
    later += xxh3_64_intdigest(later).to_bytes(SUM_BYTES, "little")
    server.put(bucket, name, bytes(body_bytes), {SEAL: base64.b64encode(later).decode()})
    assert await lender.recall(tier, [key]) == ["ChunkMissing"]
    assert tier.counts() == {"sealed_version": 1}
    assert name in server.names(bucket)


async def test_another_keys_object_is_not_taken_for_this_ones(opened, server, bucket, lender) -> None:
    tier, keys = await opened(), keys_of(2)
    await lender.keep(tier, keys)
    one, other = (name_of(server, bucket, key) for key in keys)
    server.put(bucket, one, *server.get(bucket, other))
    assert await lender.recall(tier, keys) == ["ChunkCorrupt", label(keys[1])]
    assert tier.counts() == {"corrupt_swapped": 1}


async def test_vllms_bare_objects_are_believed_only_where_that_is_asked_for(opened, server, bucket, lender) -> None:
    """They are under the same names, and have nothing that says what they should be."""
    tier, accepts, key = await opened(), await opened(unverified="accept"), key_of(1)
    await lender.keep(tier, [key])
    name = name_of(server, bucket, key)
    server.put(bucket, name, bytes(lender.chunk(key)))
    assert await lender.recall(tier, [key]) == ["ChunkMissing"]
    assert await lender.recall(accepts, [key]) == [label(key)]
    assert (tier.counts(), accepts.counts()) == ({"unverified_refused": 1}, {"unverified_accepted": 1})
    server.put(bucket, name, bytes(CHUNK_BYTES + 1))
    assert await lender.recall(accepts, [key]) == ["ChunkMissing"]
    assert name in server.names(bucket), "it is somebody else's"


async def test_a_tier_without_the_key_misses_and_deletes_nothing(opened, monkeypatch, lender) -> None:
    monkeypatch.setenv("KVTIER_TEST_OLD", "11" * 32)
    monkeypatch.setenv("KVTIER_TEST_NEW", "22" * 32)
    monkeypatch.setenv("KVTIER_TEST_BOTH", "22" * 32 + "\n" + "11" * 32)
    cipher = {"seal": "aes-256-gcm"}
    old, new, both = [await opened(seal_key_env=f"KVTIER_TEST_{which}", **cipher) for which in ("OLD", "NEW", "BOTH")]
    plain, keys = await opened(), keys_of(2)
    await lender.keep(old, keys)
    assert await lender.recall(new, keys) == ["ChunkMissing"] * 2
    assert await lender.recall(plain, keys) == ["ChunkMissing"] * 2
    assert (new.counts(), plain.counts()) == ({"sealed_key": 2}, {"sealed_kind": 2})
    assert await lender.recall(both, keys) == await lender.recall(old, keys) == [label(key) for key in keys]


@pytest.mark.parametrize("seal", ["xxh3", "aes-256-gcm"])
async def test_rows_that_take_long_to_seal_are_sealed_in_threads(opened, monkeypatch, seal) -> None:
    monkeypatch.setenv("KVTIER_TEST_KEY", "11" * 32)
    key_env = {"seal_key_env": "KVTIER_TEST_KEY"} if seal != "xxh3" else {}
    lender, keys = Lender(8 << 20), keys_of(3)
    tier = await opened(chunk_bytes=8 << 20, seal=seal, **key_env)
    await lender.keep(tier, keys)
    assert await lender.recall(tier, keys) == [label(key) for key in keys]
    lender.take_back()


# What is known without asking.


async def test_a_new_tier_knows_from_a_list_what_is_there(opened, server, bucket, proxy, lender) -> None:
    keys = keys_of(20)
    await lender.keep(await opened(), keys)
    tier = await opened(endpoint=f"http://{proxy.address}")
    async with aclosing(tier.watch()) as events:
        async for event in events:
            if isinstance(event, ScanDone):
                break
    proxy.refuse()
    assert await tier.probe(keys) == [True] * 20


async def test_a_list_that_is_cut_off_goes_on_from_there(opened, proxy, monkeypatch) -> None:
    """More names than fit one answer; the connection ends at the second, and again."""
    monkeypatch.setattr("kvtier_backends.object.backend.LIST_RETRY_S", 0.01)
    keys, lender = keys_of(1_200), Lender(4_096)
    await lender.keep(await opened(chunk_bytes=4_096, timeout_s="1min"), keys)
    first_page, cuts = threading.Event(), [None, None]

    def cut(passed: bytes) -> bytes | None:
        if first_page.is_set() and cuts:
            return cuts.pop()
        if b"</ListBucketResult>" in passed:
            first_page.set()
        return passed

    proxy.reply = cut
    tier, told = await opened(endpoint=f"http://{proxy.address}", chunk_bytes=4_096), set[OffloadKey]()
    async with aclosing(tier.watch()) as events:
        async for event in events:
            if isinstance(event, ScanDone):
                break
            told.update(event.keys)
    assert (told, cuts) == (set(keys), [])
    lender.take_back()


async def test_what_another_host_stores_is_seen_and_what_it_deletes_is_a_miss_once(opened, lender) -> None:
    ours, theirs = await opened(absent_ttl_s=0), await opened()
    keys = keys_of(3)
    assert await ours.probe(keys) == [False] * 3
    await lender.keep(theirs, keys)
    assert await ours.probe(keys) == [True] * 3
    async with aclosing(ours.watch()) as events:
        told: list[Any] = [await anext(events), await anext(events)]
        await theirs.delete(keys[:2])
        assert await lender.recall(ours, keys) == ["ChunkMissing"] * 2 + [label(keys[2])]
        told.append(await anext(events))
    assert [type(event) for event in told] == [Added, ScanDone, Removed]
    assert set(told[0].keys) == set(keys)
    assert set(told[2].keys) == set(keys[:2])
    assert await ours.probe(keys) == [False, False, True]


async def test_what_was_not_there_is_not_asked_for_again_for_a_while(opened, proxy, lender) -> None:
    tier, keys = await opened(endpoint=f"http://{proxy.address}", absent_ttl_s="1h", **QUICK), keys_of(3)
    assert await tier.probe(keys) == [False] * 3
    proxy.refuse()
    assert await tier.probe(keys) == [False] * 3
    with pytest.raises(BackendUnavailable):
        await tier.probe(keys_of(1, start=10))


async def test_a_strangers_name_that_cannot_be_listed_costs_the_list_and_nothing_else(
    opened, server, bucket, lender
) -> None:
    keys = keys_of(3)
    await lender.keep(await opened(), keys)
    folder = name_of(server, bucket, keys[0]).rsplit("/", 3)[0]
    server.put(bucket, f"{folder}//x", b"")
    tier = await opened()
    assert await tier.probe(keys) == [True] * 3
    assert await lender.recall(tier, keys) == [label(key) for key in keys]
    assert tier.counts() == {"listing_failed": 1}


async def test_names_beside_chunks_are_no_chunks(opened, server, bucket, lender) -> None:
    keys = keys_of(2)
    await lender.keep(await opened(), keys)
    folder = name_of(server, bucket, keys[0]).rsplit("/", 3)[0]
    for name in (f"{folder}/README", f"{folder}/000/00_g0/zz.bin", f"{folder}/000/"):
        server.put(bucket, name, bytes(CHUNK_BYTES))
    server.put(bucket, name_of(server, bucket, keys[1]), b"short")
    tier = await opened()
    assert await tier.probe(keys) == [True, False]


# What a store says.


async def test_a_missing_bucket_is_a_mistake_of_the_configuration(opened, server, bucket) -> None:
    server.remove_bucket(bucket)
    with pytest.raises(ConfigError, match=r"url: 's3://kvtier-.*' cannot be used: 404 NoSuchBucket"):
        await opened()


async def test_a_bucket_that_is_taken_away_costs_hits_until_it_is_back(opened, server, bucket, lender) -> None:
    tier, keys = await opened(), keys_of(3)
    await lender.keep(tier, keys)
    server.remove_bucket(bucket)
    with pytest.raises(BackendUnavailable, match="NoSuchBucket"):
        await tier.load(lender.reads(keys))
    with pytest.raises(BackendUnavailable, match="NoSuchBucket"):
        await tier.store(lender.writes(keys))
    with pytest.raises(BackendUnavailable, match="NoSuchBucket"):
        await tier.delete(keys)
    assert tier.counts()["no_bucket"] == 9
    server.client.create_bucket(Bucket=bucket)
    await recovers(tier, lender, keys)


def deny(server: S3Server, after: int) -> None:
    """Have a server of the test's own let so many requests in without looking at who sends them."""
    address, plain = f"{server.endpoint}/moto-api/reset-auth", {"Content-Type": "text/plain"}
    asked = urllib.request.Request(address, str(after).encode(), plain, method="POST")
    urllib.request.urlopen(asked, timeout=PATIENCE_S).close()


async def test_credentials_that_are_refused_are_a_mistake_at_the_start_and_an_absence_later(
    opened, own_server, bucket, lender
) -> None:
    server, keys = own_server(), keys_of(3)
    server.client.create_bucket(Bucket=bucket)
    tier = await opened(endpoint=server.endpoint)
    deny(server, 0)
    with pytest.raises(BackendUnavailable, match="403"):
        await tier.store(lender.writes(keys))
    with pytest.raises(ConfigError, match="cannot be used: 403"):
        await opened(endpoint=server.endpoint)
    deny(server, 1_000_000)
    await recovers(tier, lender, keys)
    assert tier.counts()["denied"] == 3


async def test_credentials_that_nobody_has_are_a_mistake_at_the_start(opened, proxy, monkeypatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", f"http://{proxy.address}")  # Where a machine in a cloud has some.
    proxy.refuse()
    with pytest.raises(ConfigError, match="no credentials: the environment has none, and the machine gives none"):
        await opened()


def says(status: str, code: str) -> Any:
    """Have a proxy answer with an error in place of each reply."""
    body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>So it is.</Message></Error>"
    reply = f"HTTP/1.1 {status}\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()
    return lambda passed: reply if passed.startswith(b"HTTP/") else b""


@pytest.mark.parametrize(
    ("status", "code", "counted"),
    [
        ("503 Slow Down", "SlowDown", "slowed_down"),
        ("400 Bad Request", "ExpiredToken", "denied"),
        ("403 Forbidden", "RequestTimeTooSkewed", "denied"),
        ("301 Moved Permanently", "PermanentRedirect", "elsewhere"),
        ("500 Internal Server Error", "InternalError", "unreachable"),
    ],
)
async def test_each_error_of_a_store_is_an_absence_until_it_is_over(
    opened, proxy, lender, status, code, counted
) -> None:
    tier, keys = await opened(endpoint=f"http://{proxy.address}"), keys_of(3)
    await lender.keep(tier, keys)
    proxy.reply = says(status, code)
    for call in (tier.load(lender.reads(keys)), tier.store(lender.writes(keys)), tier.delete(keys)):
        with pytest.raises(BackendUnavailable, match=f"{code}|Received redirect"):
            await call
    assert tier.counts() == {counted: 9}
    proxy.reply = lambda passed: passed
    await recovers(tier, lender, keys)


async def test_a_store_without_room_is_no_space_and_goes_on_giving(opened, proxy, lender) -> None:
    tier, keys = await opened(endpoint=f"http://{proxy.address}"), keys_of(3)
    await lender.keep(tier, keys)
    proxy.reply = says("507 Insufficient Storage", "XMinioStorageFull")
    outcomes = await tier.store(lender.writes(keys))
    assert [type(outcome).__name__ for outcome in outcomes] == ["NoSpace"] * 3
    assert tier.counts() == {"no_room": 3}
    proxy.reply = lambda passed: passed
    assert await lender.recall(tier, keys) == [label(key) for key in keys]


async def test_a_store_that_is_busy_for_a_moment_is_asked_again(opened, proxy, lender) -> None:
    tier, keys, busy = await opened(endpoint=f"http://{proxy.address}"), keys_of(3), says("503 Slow Down", "SlowDown")
    await lender.keep(tier, keys)
    left = [True]
    proxy.reply = lambda passed: busy(passed) if passed.startswith(b"HTTP/") and left and left.pop() else passed
    assert await lender.recall(tier, keys[:1]) == [label(keys[0])]
    assert tier.counts() == {}


# What networks do.


async def test_a_refused_connection_is_an_unavailable_tier_until_somebody_listens(opened, proxy, lender) -> None:
    tier, keys = await opened(endpoint=f"http://{proxy.address}", **UNKNOWN, **QUICK), keys_of(3)
    await lender.keep(await opened(), keys)
    proxy.refuse()
    for call in (tier.probe(keys), tier.load(lender.reads(keys)), tier.store(lender.writes(keys)), tier.delete(keys)):
        with pytest.raises(BackendUnavailable):
            await call
    with pytest.raises(BackendUnavailable):
        await opened(endpoint=f"http://{proxy.address}", **QUICK)
    proxy.listen()
    await recovers(tier, lender, keys)


async def test_a_connection_reset_while_idle_costs_nothing(opened, proxy, lender) -> None:
    tier, keys = await opened(endpoint=f"http://{proxy.address}"), keys_of(3)
    await lender.keep(tier, keys)
    proxy.reset()
    assert await lender.recall(tier, keys) == [label(key) for key in keys]


@pytest.mark.parametrize("operation", ["load", "store", "probe"])
async def test_a_connection_that_has_died_silently_costs_time_and_nothing_else(
    opened, proxy, lender, operation
) -> None:
    """As behind a gateway that forgets idle connections: nothing is closed, and nothing comes back."""
    tier, keys = await opened(endpoint=f"http://{proxy.address}", **UNKNOWN, timeout_s=4), keys_of(1)
    await lender.keep(tier, keys)
    first, ended = [True], threading.Event()

    def swallow(passed: bytes) -> bytes | None:
        return passed if not first or ended.wait(PATIENCE_S * first.pop()) else None

    proxy.reply = swallow
    if operation == "load":
        assert await lender.recall(tier, keys) == [label(keys[0])]
    elif operation == "store":
        await lender.keep(tier, keys, version=1)
    else:
        assert await tier.probe(keys) == [True]
    assert not first
    ended.set()


async def test_a_body_cut_in_the_middle_is_no_chunk(opened, proxy, lender) -> None:
    """The connection ends behind half of it, each time it is tried."""
    tier, keys = await opened(endpoint=f"http://{proxy.address}", requests=1, **QUICK), keys_of(3)
    await lender.keep(await opened(), keys)
    proxy.piece_bytes = CHUNK_BYTES // 2
    proxy.reply = lambda passed: passed if b"HTTP/1" in passed[:8] else None
    with pytest.raises(BackendUnavailable):
        await tier.load(lender.reads(keys))
    proxy.reply = lambda passed: passed
    await recovers(tier, lender, keys)


async def test_a_byte_flipped_on_the_way_is_never_believed(opened, proxy, lender) -> None:
    tier, keys = await opened(endpoint=f"http://{proxy.address}"), keys_of(3)
    await lender.keep(tier, keys)
    row = bytes(lender.chunk(keys[1]))
    piece = row[8_000:8_032]
    proxy.reply = lambda passed: passed.replace(piece, flipped(piece, 7))
    told = await lender.recall(tier, keys)
    assert told[1] in ("ChunkCorrupt", label(keys[1])), told
    assert (told[0], told[2]) == (label(keys[0]), label(keys[2]))


async def test_a_server_that_hangs_fails_calls_in_time_and_no_byte_comes_late(opened, proxy, lender) -> None:
    tier, keys = await opened(endpoint=f"http://{proxy.address}", **QUICK), keys_of(20)
    await lender.keep(await opened(), keys)
    proxy.open.clear()
    reads, writes = lender.reads(keys), lender.writes(keys, version=1)
    for call in (tier.load(reads), tier.store(writes), tier.delete(keys)):
        with pytest.raises(BackendUnavailable, match=r"not answered within 2 s|timed out|error sending"):
            await call
    rows = [read.into for read in reads] + [write.row for write in writes]
    await used_again(lender, rows)
    proxy.open.set()
    await recovers(tier, lender, keys_of(3, start=50))
    await used_again(lender, rows)


async def test_a_reply_that_drips_is_over_in_time(opened, proxy, lender) -> None:
    tier, keys, enough = await opened(endpoint=f"http://{proxy.address}", **QUICK), keys_of(4), threading.Event()
    await lender.keep(await opened(), keys)
    proxy.piece_bytes = 64

    def drip(passed: bytes) -> bytes:
        enough.wait(0.05)
        return passed

    proxy.reply = drip
    with pytest.raises(BackendUnavailable):
        await tier.load(lender.reads(keys))
    enough.set()
    await recovers(tier, lender, keys)


async def test_a_cancelled_call_to_a_hung_server_ends_with_its_time_out(opened, proxy, lender) -> None:
    tier, keys = await opened(endpoint=f"http://{proxy.address}", **QUICK), keys_of(4)
    await lender.keep(await opened(), keys)
    proxy.open.clear()
    reads, writes = lender.reads(keys), lender.writes(keys)
    calls = [asyncio.create_task(call) for call in (tier.load(reads), tier.store(writes), tier.probe(keys_of(2, 90)))]
    for _ in range(3):
        await asyncio.sleep(0.01)
        for call in calls:
            call.cancel()
    for call in calls:
        with pytest.raises(asyncio.CancelledError):
            await call
    await used_again(lender, [read.into for read in reads] + [write.row for write in writes])
    proxy.open.set()
    await recovers(tier, lender, keys)


async def test_closing_ends_calls_that_hang(opened, proxy, lender) -> None:
    tier, keys = await opened(endpoint=f"http://{proxy.address}", timeout_s=PATIENCE_S), keys_of(4)
    await lender.keep(tier, keys)
    proxy.open.clear()
    reads = lender.reads(keys)
    calls = [asyncio.create_task(call) for call in (tier.load(reads), tier.store(lender.writes(keys)))]
    await asyncio.sleep(0.05)
    assert await tier.aclose(0.05) == Abandoned(0)
    for call in calls:
        with pytest.raises(BackendUnavailable):
            await call
    await used_again(lender, [read.into for read in reads])
    proxy.open.set()


async def test_a_killed_server_costs_its_chunks_and_is_used_again_when_it_is_back(
    opened, own_server, bucket, lender
) -> None:
    server, keys = own_server(), keys_of(5)
    server.client.create_bucket(Bucket=bucket)
    tier = await opened(endpoint=server.endpoint, **QUICK)
    await lender.keep(await opened(endpoint=server.endpoint), keys)
    server.kill()
    with pytest.raises(BackendUnavailable) as failed:
        await tier.load(lender.reads(keys))
    assert cause_of(failed.value) == "ECONNREFUSED"
    server.start()
    server.client.create_bucket(Bucket=bucket)
    assert await recalled(tier, lender, keys) == ["ChunkMissing"] * 5
    await recovers(tier, lender, keys)


async def test_a_stopped_server_costs_hits_until_it_goes_on(opened, own_server, bucket, lender) -> None:
    server, keys = own_server(), keys_of(5)
    server.client.create_bucket(Bucket=bucket)
    tier = await opened(endpoint=server.endpoint, **QUICK)
    await lender.keep(await opened(endpoint=server.endpoint), keys)
    server.signal(signal.SIGSTOP)
    reads = lender.reads(keys)
    with pytest.raises(BackendUnavailable) as failed:
        await tier.load(reads)
    assert cause_of(failed.value) == "ETIMEDOUT"
    await used_again(lender, [read.into for read in reads])
    server.signal(signal.SIGCONT)
    await recovers(tier, lender, keys)


async def test_a_tier_that_does_not_open_leaves_no_thread(opened, proxy) -> None:
    before = {thread.name for thread in threading.enumerate()}
    proxy.refuse()
    with pytest.raises(BackendUnavailable):
        await opened(endpoint=f"http://{proxy.address}", **QUICK)
    gc.collect()
    ends_at = asyncio.get_running_loop().time() + PATIENCE_S
    while left := {thread.name for thread in threading.enumerate()} - before:
        assert asyncio.get_running_loop().time() < ends_at, left
        await asyncio.sleep(0.01)
