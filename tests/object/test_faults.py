"""Faults of a bucket and of its connections: no wrong byte, no row that stays lent, and hits afterwards."""

import asyncio
import base64
import gc
import threading
import urllib.request
from contextlib import aclosing
from typing import Any

import pytest
from xxhash import xxh3_64_intdigest

from kvtier.backend import SEAL_BYTES, Added, BackendUnavailable, ConfigError, OffloadKey, Removed, ScanDone
from kvtier.testing.conformance import Lender, key_of, keys_of, label
from kvtier_backends.object.bucket import SEAL_NAME
from tests.object.conftest import QUICK
from tests.remote.servers import PATIENCE_S
from tests.remote.tiers import CHUNK_BYTES, kept, recovers

UNKNOWN = {"index_chunks": 0, "absent_ttl_s": 0}  # Every look-up asks.
VERSION_AT, SUM_BYTES = 24, 8  # In a seal; the sum is at its end.


@pytest.mark.parametrize("seal", ["no base64!", "AAAA", base64.b64encode(bytes(SEAL_BYTES)).decode()])
async def test_an_object_with_an_unreadable_seal_is_corrupt_and_replaced(opened, server, bucket, stored, lender, seal):
    tier, (key,) = await kept(lender, opened(), 1)
    server.put(bucket, stored.name(key), bytes(CHUNK_BYTES), {SEAL_NAME: seal})
    assert await lender.recall(tier, [key]) == ["ChunkCorrupt"]
    assert tier.counts() == {"corrupt_foreign": 1}
    await lender.keep(tier, [key])
    assert await lender.recall(tier, [key]) == [label(key)]


@pytest.mark.parametrize(("body_bytes", "more"), [(CHUNK_BYTES, b""), (CHUNK_BYTES, b"more"), (CHUNK_BYTES // 2, b"")])
async def test_an_object_of_a_later_version_is_left_alone(opened, server, bucket, stored, lender, body_bytes, more):
    tier, (key,) = await kept(lender, opened(), 1)
    name = stored.name(key)
    seal = bytearray(base64.b64decode(server.get(bucket, name)[1][SEAL_NAME]))
    seal[VERSION_AT] += 1
    later = bytes(seal[:-SUM_BYTES]) + more
    later += xxh3_64_intdigest(later).to_bytes(SUM_BYTES, "little")
    server.put(bucket, name, bytes(body_bytes), {SEAL_NAME: base64.b64encode(later).decode()})
    assert await lender.recall(tier, [key]) == ["ChunkMissing"]
    assert tier.counts() == {"sealed_version": 1}
    assert name in server.names(bucket)


async def test_vllms_bare_objects_are_loaded_only_with_unverified_accept(opened, server, bucket, stored, lender):
    tier, accepts, key = await opened(), await opened(unverified="accept"), key_of(1)
    await lender.keep(tier, [key])
    name = stored.name(key)
    server.put(bucket, name, bytes(lender.chunk(key)))
    assert await lender.recall(tier, [key]) == ["ChunkMissing"]
    assert await lender.recall(accepts, [key]) == [label(key)]
    assert (tier.counts(), accepts.counts()) == ({"unverified_refused": 1}, {"unverified_accepted": 1})
    server.put(bucket, name, bytes(CHUNK_BYTES + 1))
    assert await lender.recall(accepts, [key]) == ["ChunkMissing"]
    assert name in server.names(bucket), "it is somebody else's"


@pytest.mark.parametrize("seal", ["xxh3", "aes-256-gcm"])
async def test_rows_that_take_long_to_seal_are_sealed_in_threads(opened, monkeypatch, seal):
    monkeypatch.setenv("KVTIER_TEST_KEY", "11" * 32)
    key_env = {"seal_key_env": "KVTIER_TEST_KEY"} if seal != "xxh3" else {}
    lender, keys = Lender(8 << 20), keys_of(3)
    tier = await opened(chunk_bytes=8 << 20, seal=seal, **key_env)
    await lender.keep(tier, keys)
    assert await lender.recall(tier, keys) == [label(key) for key in keys]
    lender.take_back()


async def test_a_new_tier_answers_from_its_start_up_list(opened, server, bucket, proxy, lender):
    keys = keys_of(20)
    await lender.keep(await opened(), keys)
    tier = await opened(endpoint=f"http://{proxy.address}")
    async with aclosing(tier.watch()) as events:
        async for event in events:
            if isinstance(event, ScanDone):
                break
    proxy.refuse()
    assert await tier.probe(keys) == [True] * 20


async def test_an_interrupted_list_continues_from_the_last_name(opened, server, proxy, monkeypatch):
    """More names than fit one answer; the connection ends at the second, and again."""
    monkeypatch.setattr("kvtier_backends.object.backend.LIST_RETRY_S", 0.01)
    monkeypatch.setattr("kvtier_backends.object.backend.PAGE_KEYS", server.page_keys)
    keys, lender = keys_of(server.page_keys * 6 // 5), Lender(4_096)
    await lender.keep(await opened(chunk_bytes=4_096, timeout_s="1min"), keys)
    first_page, cuts = threading.Event(), [None, None]

    def cut(passed):
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


async def test_another_hosts_stores_are_found_and_its_deletions_are_one_miss(opened, lender):
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
    assert ([type(event) for event in told], set(told[0].keys)) == ([Added, ScanDone, Removed], set(keys))
    assert (set(told[2].keys), await ours.probe(keys)) == (set(keys[:2]), [False, False, True])


async def test_a_missing_chunk_is_not_asked_for_again_for_absent_ttl_s(opened, proxy, lender):
    tier, keys = await opened(endpoint=f"http://{proxy.address}", absent_ttl_s="1h", **QUICK), keys_of(3)
    assert await tier.probe(keys) == [False] * 3
    proxy.refuse()
    assert await tier.probe(keys) == [False] * 3
    with pytest.raises(BackendUnavailable):
        await tier.probe(keys_of(1, start=10))


async def test_a_name_that_cannot_be_listed_costs_the_list_and_nothing_else(opened, server, bucket, stored, lender):
    keys = keys_of(3)
    await lender.keep(await opened(), keys)
    folder = stored.name(keys[0]).rsplit("/", 3)[0]
    for name in (f"{folder}/README", f"{folder}/000/00_g0/zz.bin", f"{folder}/000/"):
        server.put(bucket, name, bytes(CHUNK_BYTES))
    server.put(bucket, stored.name(keys[2]), b"short")
    assert await (await opened()).probe(keys) == [True, True, False]
    server.put(bucket, f"{folder}//x", b"")
    tier = await opened()
    assert await tier.probe(keys) == [True, True, False]
    assert await lender.recall(tier, keys[:2]) == [label(key) for key in keys[:2]]
    assert tier.counts() == {"listing_failed": 1}


@pytest.mark.promise("`object`: the bucket is away")
async def test_a_removed_bucket_costs_hits_until_it_is_back(opened, server, bucket, stored, lender):
    tier, keys = await kept(lender, opened(), 3)
    server.remove_bucket(bucket)
    with pytest.raises(ConfigError, match=r"url: 's3://kvtier-.*' cannot be used: 404 NoSuchBucket"):
        await opened()
    for call in (tier.load(lender.reads(keys)), tier.store(lender.writes(keys)), tier.delete(keys)):
        with pytest.raises(BackendUnavailable, match="NoSuchBucket"):
            await call
    assert tier.counts()["no_bucket"] == 9
    server.client.create_bucket(Bucket=bucket)
    await recovers(tier, lender, keys)


def deny(server, after):
    address, plain = f"{server.endpoint}/moto-api/reset-auth", {"Content-Type": "text/plain"}
    asked = urllib.request.Request(address, str(after).encode(), plain, method="POST")
    urllib.request.urlopen(asked, timeout=PATIENCE_S).close()


@pytest.mark.promise("Password, bucket, certificate or topology are wrong")
@pytest.mark.promise("`object`: credentials expire, or lose their rights")
async def test_refused_credentials_are_a_config_error_at_first_and_unavailable_later(
    opened, own_server, bucket, lender
):
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


async def test_missing_credentials_are_a_config_error_at_the_start(opened, proxy, monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", f"http://{proxy.address}")  # Where a machine in a cloud has some.
    proxy.refuse()
    with pytest.raises(ConfigError, match="no credentials: the environment has none, and the machine gives none"):
        await opened()


def says(status, code):
    body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>So it is.</Message></Error>"
    reply = f"HTTP/1.1 {status}\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()
    return lambda passed: reply if passed.startswith(b"HTTP/") else b""


@pytest.mark.promise("`object`: the store answers 503 or 500")
@pytest.mark.promise("`object`: credentials expire, or lose their rights")
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
async def test_each_error_of_a_store_is_unavailable_until_it_ends(opened, proxy, lender, status, code, counted):
    tier, keys = await kept(lender, opened(endpoint=f"http://{proxy.address}"), 3)
    proxy.reply = says(status, code)
    for call in (tier.load(lender.reads(keys)), tier.store(lender.writes(keys)), tier.delete(keys)):
        with pytest.raises(BackendUnavailable, match=f"{code}|Received redirect"):
            await call
    assert tier.counts() == {counted: 9}
    proxy.reply = lambda passed: passed
    await recovers(tier, lender, keys)


@pytest.mark.promise("It is full")
async def test_a_store_without_room_has_no_space_and_still_loads(opened, proxy, lender):
    tier, keys = await kept(lender, opened(endpoint=f"http://{proxy.address}"), 3)
    proxy.reply = says("507 Insufficient Storage", "XMinioStorageFull")
    outcomes = await tier.store(lender.writes(keys))
    assert [type(outcome).__name__ for outcome in outcomes] == ["NoSpace"] * 3
    assert tier.counts() == {"no_room": 3}
    proxy.reply = lambda passed: passed
    assert await lender.recall(tier, keys) == [label(key) for key in keys]


@pytest.mark.promise("`object`: the store answers 503 or 500")
async def test_a_store_that_is_busy_for_a_moment_is_retried(opened, proxy, lender):
    tier, keys, busy = await opened(endpoint=f"http://{proxy.address}"), keys_of(3), says("503 Slow Down", "SlowDown")
    await lender.keep(tier, keys)
    left = [True]
    proxy.reply = lambda passed: busy(passed) if passed.startswith(b"HTTP/") and left and left.pop() else passed
    assert (await lender.recall(tier, keys[:1]), tier.counts()) == ([label(keys[0])], {})


@pytest.mark.parametrize("operation", ["load", "store", "probe"])
async def test_a_connection_that_has_died_silently_costs_time_and_nothing_else(opened, proxy, lender, operation):
    """As behind a gateway that forgets idle connections: nothing is closed, and nothing comes back."""
    tier, keys = await kept(lender, opened(endpoint=f"http://{proxy.address}", **UNKNOWN, timeout_s=4), 1)
    first, ended = [True], threading.Event()

    def swallow(passed):
        return passed if not first or ended.wait(PATIENCE_S * first.pop()) else None

    proxy.reply = swallow
    given = {"load": lender.reads, "store": lender.writes, "probe": list}[operation](keys)
    assert list(await getattr(tier, operation)(given)) == [operation == "probe" or None]
    assert not first
    ended.set()


async def test_a_body_cut_in_the_middle_is_no_chunk(opened, proxy, lender):
    tier, keys = await opened(endpoint=f"http://{proxy.address}", requests=1, **QUICK), keys_of(3)
    await lender.keep(await opened(), keys)
    proxy.piece_bytes = CHUNK_BYTES // 2
    proxy.reply = lambda passed: passed if b"HTTP/1" in passed[:8] else None
    with pytest.raises(BackendUnavailable):
        await tier.load(lender.reads(keys))
    proxy.reply = lambda passed: passed
    await recovers(tier, lender, keys)


async def test_a_tier_that_does_not_open_leaves_no_thread(opened, proxy):
    before = {thread.name for thread in threading.enumerate()}
    proxy.refuse()
    with pytest.raises(BackendUnavailable):
        await opened(endpoint=f"http://{proxy.address}", **QUICK)
    gc.collect()
    ends_at = asyncio.get_running_loop().time() + PATIENCE_S
    while left := {thread.name for thread in threading.enumerate()} - before:
        assert asyncio.get_running_loop().time() < ends_at, left
        await asyncio.sleep(0.01)
