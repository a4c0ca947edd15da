"""Sessions of engines with their keeper, in one process: what they see of each other, and how each of them ends."""

import asyncio
import errno
import os
import shutil
import socket
import threading
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import pytest

from kvtier.backend import Advice, Namespace, OffloadKey, unpack_keys
from kvtier.errors import BackendUnavailable, ConfigError
from kvtier.testing.conformance import Follower, Lender, keys_of, label
from kvtier_backends.fs.host import keeper, meeting
from kvtier_backends.fs.host.meeting import Place
from kvtier_backends.fs.options import MemoryOptions, common_options
from kvtier_backends.fs.segments import kept, room, wire
from tests.fs.conftest import ROW_BYTES, kinds, until_probed, until_stored, whole
from tests.fs.host.conftest import CAPACITY_BYTES, PATIENCE_S, filled, keepers, until, until_filled

HANDS = [b"\xff" * 64, b"\x03\0\0\0abc", b"\x04\0\0\0\xff\xff\xff\x7f", b"\0\0\0\0", b"GET / HTTP/1.1\r\n\r\n"]


@pytest.fixture(params=["fs", "memory"])
def kind(request):
    return request.param


@pytest.fixture
def place(kind, root, pool):
    return Place(str(root)) if kind == "fs" else Place.of_pool(pool)


@pytest.fixture
def kept_by(keep, place):
    return keep(place)


@pytest.fixture
def of_pool(keep, pool):
    return keep(Place.of_pool(pool))


@pytest.fixture
def by_hand(peer, pool, of_pool):
    def by_hand(*, hello=True, **how):
        made, options = peer(Place.of_pool(pool)), MemoryOptions(pool=pool, shared=True, capacity_bytes=CAPACITY_BYTES)
        assert not hello or made.hello(common_options(options), **how).refusal == ""
        return made

    return by_hand


async def until_lost(tier, *, there=False):
    async with asyncio.timeout(PATIENCE_S):
        found = not there
        while found is not there:
            try:
                await tier.delete(keys_of(1))
                found = True
            except BackendUnavailable:
                found = False


# What engines see of each other.


async def test_engines_see_what_others_store_and_delete(kept_by, kind, join, lender):
    one, other = await join(kind), await join(kind)
    follower, keys = Follower(other), keys_of(20)
    await follower.until(lambda: follower.scanned)
    await lender.keep(one, keys)
    await follower.until(lambda: follower.held == set(keys))
    assert list(await other.probe(keys)) == [True] * 20
    assert await lender.recall(other, keys) == whole(keys)
    await one.delete(keys[:5])
    await follower.until(lambda: follower.held == set(keys[5:]))
    assert list(await other.probe(keys)) == [False] * 5 + [True] * 15
    assert await lender.recall(other, keys[:5]) == ["ChunkMissing"] * 5
    later = Follower(await join(kind))
    await later.until(lambda: later.scanned)
    assert later.held == set(keys[5:])


async def test_a_chunk_that_another_engine_is_storing_is_refused_as_that(by_hand, join, lender):
    hand, tier, keys = by_hand(), await join("memory"), keys_of(8)
    assert hand.call(1, "reserve", keys[:4]).failure == ""
    assert kinds(await tier.store(lender.writes(keys))) == ["NoSpace"] * 4 + ["NoneType"] * 4
    assert tier.counters().refused == {"storing": 4}
    hand.send(wire.End(1))
    await until_stored(tier, lender, keys[:4])
    assert await lender.recall(tier, keys) == whole(keys)


async def test_a_chunk_that_an_engine_is_storing_twice_is_refused_to_others_until_both_have_ended(by_hand):
    hand, other, keys = by_hand(), by_hand(), keys_of(2)
    for number, given in enumerate([keys[:1], keys, keys[:1] * 2]):
        assert hand.call(number + 1, "reserve", given).refusals == []
    refused = []
    for number in (1, 2, 3):
        hand.send(wire.End(number))
        hand.call(9, "report")
        refused.append([places for places, *_ in other.call(number, "reserve", keys).refusals])
        other.send(wire.End(number))
    assert refused == [[[0, 1]], [[0]], []]


async def test_messages_come_in_order_with_their_descriptors_however_little_the_peer_takes_at_once(tmp_path):
    came, inodes, paths = [], [], [tmp_path, "/", "/dev"]

    def received(message, descriptor):
        came.append(message.id)
        if message.id % 100 == 99:
            inodes.append(os.fstat(fd := descriptor()).st_ino)
            os.close(fd)

    ends = [wire.Link(end, wire.ToKeeper, received, list) for end in socket.socketpair()]
    for number in range(300):
        fd = os.open(paths[number // 100], os.O_RDONLY) if number % 100 == 99 else None
        ends[0].send(wire.Call(number, "probe", keeper.pack_keys(keys_of(8 * number))), fd, soon=number % 4 != 0)
    async with asyncio.timeout(PATIENCE_S):
        while len(came) < 300:
            await asyncio.sleep(0.01)
    assert (came, inodes) == ([*range(300)], [os.stat(path).st_ino for path in paths])
    list(map(wire.Link.close, ends))


# Slots come back.


@pytest.mark.parametrize("stores", [False, True], ids=["lease", "store"])
async def test_a_cancelled_call_gives_its_slots_back(kept_by, kind, join, stores):
    tier, lender, keys = await join(kind), Lender(ROW_BYTES), keys_of(40)
    all_of_them = await filled(tier)
    await lender.keep(tier, keys)
    for steps in range(60):
        call = tier.store(lender.writes(keys)) if stores else tier.load(lender.reads(keys))
        task = asyncio.create_task(call)
        for _ in range(steps):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait({task})
    await until_filled(tier, all_of_them)
    assert (await join(kind)).counters().corrupt == {}


async def test_a_tier_that_is_closed_with_a_store_in_flight_keeps_its_slots_until_that_ends(
    kept_by, kind, join, system_call, lender
):
    other = await join(kind)
    all_of_them = await filled(other)
    tier, write = await join(kind), system_call("pwritev", sticks=True)
    storing = await write.met_by(tier.store(lender.writes(keys_of(8))))
    assert await tier.aclose(0.05) == (1,)
    write.let_go()
    await asyncio.wait({storing})
    await until_filled(other, all_of_them)
    assert isinstance(storing.exception(), BackendUnavailable | None)


async def test_a_tier_that_is_closed_leaves_no_thread(kept_by, kind, join):
    await (await join(kind)).aclose(PATIENCE_S)
    until(lambda: not [thread for thread in threading.enumerate() if thread.name.startswith("kvtier-0:tested")])


async def test_a_delete_voids_the_stores_that_were_reserved_before_it(by_hand, join):
    hand, tier, keys = by_hand(), await join("memory"), keys_of(2)
    hand.call(1, "reserve", keys)
    await tier.delete(keys)
    hand.call(2, "reserve", keys[1:])
    hand.send(wire.End(1, b"\1\1"))
    hand.call(3, "report")
    assert hand.call(4, "probe", keys).own == bytes(2)
    hand.send(wire.End(2, b"\1"))
    assert hand.call(5, "probe", keys).own == b"\0\1"


async def test_an_engine_that_gives_a_stopped_keeper_up_leaves_no_slot_there(
    kept_by, kind, join, system_call, monkeypatch, lender
):
    """What it was writing meanwhile is its own until it has written it."""
    other, tier = await join(kind), await join(kind)
    all_of_them = await filled(other)
    monkeypatch.setattr(kept, "ANSWER_S", 0.2)
    write = system_call("pwritev", sticks=True)
    storing = await write.met_by(tier.store(lender.writes(keys_of(8))))
    with kept_by.stopped():
        for _ in range(300):  # More than the socket takes: the end of the session waits behind it.
            tier.advise(Advice("demote", keys_of(64)))
        await until_lost(tier)
        write.let_go()
        await asyncio.wait({storing})
    assert isinstance(storing.exception(), BackendUnavailable)
    monkeypatch.setattr(kept, "ANSWER_S", PATIENCE_S)
    await until_lost(tier, there=True)
    await until_filled(other, all_of_them)


async def test_a_call_that_waits_for_its_turn_for_long_keeps_its_session(by_hand, join, lender, monkeypatch):
    hand, tier = by_hand(model="other"), await join("memory")
    monkeypatch.setattr(kept, "ANSWER_S", 0.4)
    answer = hand.call(1, "lease", keys_of((64 << 20) // ROW_BYTES))  # All of the gate's width, for a second.
    await lender.keep(tier, keys_of(3))
    assert answer.failure == ""


async def test_what_an_engine_said_before_its_end_is_heard(of_pool, by_hand, join):
    hand, tier, keys = by_hand(), await join("memory"), keys_of(4)
    assert hand.call(1, "reserve", keys).failure == ""
    with of_pool.stopped():
        hand.send(wire.Call(2, "report", keeper.pack_keys(())))
        hand.send(wire.End(1, b"\1" * 4))
        hand.close()
    await until_probed(tier, keys, there=True)


# Greetings, and peers that are none.


async def test_options_that_differ_are_refused_by_name_and_value(kept_by, kind, join):
    await join(kind)
    with pytest.raises(ConfigError, match=f"capacity_bytes: {2 * CAPACITY_BYTES} given, {CAPACITY_BYTES} accepted"):
        await join(kind, capacity_bytes=2 * CAPACITY_BYTES)
    await join(kind, load_lanes=1, store_lanes=1)


async def test_options_of_an_engine_that_was_refused_bind_nobody(kept_by, kind, join):
    with pytest.raises(ConfigError, match="model_name"):
        await join(kind, model_name="m" * 250)
    await join(kind)


async def test_another_protocol_is_refused(by_hand):
    hand = by_hand(hello=False)
    welcome = hand.hello({}, protocol=2)
    assert welcome.is_config
    assert "protocol is 2, its keeper's 1" in welcome.refusal


def nonsense(hand, at):
    if at < len(HANDS):
        with suppress(OSError):
            hand.socket.sendall(HANDS[at])
            hand.socket.shutdown(socket.SHUT_WR)
        return
    keys = keeper.pack_keys(keys_of(2))
    messages = [
        [wire.Call(1, "lease", keys)],
        [wire.Hello(1, "memory", {}, Namespace(model_name="m"), ROW_BYTES, 0.5, "")],
        [wire.Call(1, "judge", keys, [(1 << 60, 0, None)])],
        [wire.Call(1, "lease", keys)] * 2,
        [wire.Call(1, "lease", (b"\x01", b"\xff\xff"))],
    ][at - len(HANDS)]
    for message in messages:
        hand.send(message)


@pytest.mark.parametrize("at", range(len(HANDS) + 5))
async def test_nonsense_ends_its_own_session_only(by_hand, join, lender, at):
    tier = await join("memory")
    await lender.keep(tier, keys_of(4))
    all_of_them = await filled(tier)
    hand = by_hand(hello=at > len(HANDS))
    nonsense(hand, at)
    assert hand.is_ended()
    assert await filled(tier, 2_000_000) == all_of_them


async def test_options_that_are_none_end_their_session_only(by_hand, join):
    hand = by_hand(hello=False)
    hand.send(wire.Hello(1, "memory", {"capacity_bytes": "much"}, Namespace(model_name="m"), ROW_BYTES, 0.5, ""))
    assert hand.is_ended()
    await join("memory")


async def test_more_sessions_than_the_most_are_refused_until_one_ends(of_pool, join, monkeypatch, lender):
    monkeypatch.setattr(keeper, "SESSIONS_MAX", 2)
    first, _ = await join("memory"), await join("memory")
    with pytest.raises(BackendUnavailable, match="the keeper is gone"):
        await join("memory")
    await first.aclose(PATIENCE_S)
    async with asyncio.timeout(PATIENCE_S):
        while True:
            with suppress(BackendUnavailable):
                third = await join("memory")
                break
    await lender.keep(third, keys_of(3))


async def test_a_keeper_without_descriptors_serves_its_sessions_and_accepts_others_later(of_pool, by_hand, monkeypatch):
    hand, tries = by_hand(), []

    def accept(_):
        tries.append(1)
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patch:
        patch.setattr(socket.socket, "accept", accept)
        later = by_hand(hello=False)
        for number in range(100):
            hand.call(number, "report")
    assert 0 < len(tries) < 50
    assert later.call(1, "report").failure == ""


async def test_a_deaf_session_ends_and_the_others_are_still_told(by_hand, join, lender, monkeypatch):
    monkeypatch.setattr(wire, "UNSENT_BYTES_MAX", 50_000)
    hand, one, other = by_hand(), await join("memory"), await join("memory")
    hand.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
    all_of_them, keys = await filled(one), keys_of(64)
    hand.call(1, "reserve", keys_of(8, 900))
    for _ in range(150):
        await lender.keep(one, keys)
        assert lender.take_back()
        await one.delete(keys)
    assert hand.is_ended()
    await lender.keep(one, keys)
    await until_probed(other, keys, there=True)
    hand.send(wire.End(0))  # Its slots come back.
    await until_filled(one, all_of_them)


async def test_a_session_is_told_of_more_chunks_than_may_wait_to_be_sent(by_hand, join, lender, monkeypatch):
    tier, keys, told = await join("memory"), [OffloadKey(key.ljust(2_000, b"k")) for key in keys_of(300)], []
    await lender.keep(tier, keys)
    monkeypatch.setattr(wire, "UNSENT_BYTES_MAX", 50_000)
    monkeypatch.setattr(keeper.api, "INVENTORY_BATCH_KEYS", 16)
    hand = by_hand()
    while (said := hand.until(wire.Inventory)).scanned is None:
        told += unpack_keys(said.keys)
    assert set(told) == set(keys)


async def test_descriptors_of_segments_are_not_inherited_by_other_programs(kept_by, kind, join, lender):
    before = set(os.listdir("/proc/self/fd"))
    await lender.keep(await join(kind), keys_of(3))
    new = [int(fd) for fd in set(os.listdir("/proc/self/fd")) - before if os.path.exists(f"/proc/self/fd/{fd}")]
    assert new
    assert not any(map(os.get_inheritable, new))


# A keeper that is gone.


async def test_after_a_keeper_is_lost_the_next_calls_find_a_new_one(kept_by, keep, place, kind, join, lender):
    """What was at the root is found again; what was in the pool is reported as removed."""
    tier, keys = await join(kind), keys_of(10)
    follower = Follower(tier)
    await lender.keep(tier, keys)
    follower.held.update(keys)
    await follower.until(lambda: follower.scanned)
    kept_by.end()
    keep(place)
    await until_lost(tier)
    held = set(keys) if kind == "fs" else set()
    assert await lender.recall(tier, keys) == (whole(keys) if held else ["ChunkMissing"] * 10)
    await follower.until(lambda: follower.held == held)
    await lender.keep(tier, keys)


async def test_a_lookup_of_an_engine_that_has_lost_its_keeper_is_unavailable(kept_by, kind, join, lender):
    tier, keys = await join(kind), keys_of(4)
    await lender.keep(tier, keys)
    kept_by.end()
    with pytest.raises(BackendUnavailable, match="the keeper is gone"):
        await until_probed(tier, keys, there=False)


async def test_an_engine_that_meets_a_keeper_at_its_end_joins_the_next_one(keep, place, kind, join):
    os.makedirs(place.directory, exist_ok=True)
    with place.listen() as listener:
        joining = asyncio.create_task(join(kind))
        (await asyncio.get_running_loop().sock_accept(listener))[0].close()
        keep(place)
    await joining


async def test_a_root_that_is_removed_under_the_keeper_is_begun_again(keep, root, join, lender, monkeypatch):
    monkeypatch.setattr(keeper, "LOOK_S", 0.02)
    first, tier, keys = keep(Place(str(root))), await join(), keys_of(10)
    follower = Follower(tier)
    await lender.keep(tier, keys)
    follower.held.update(keys)
    await follower.until(lambda: follower.scanned)
    gone = root.rename(root.with_name("gone"))  # Removed at once: the keeper's last checkpoint would be in the way.
    assert await asyncio.to_thread(first.ended)
    shutil.rmtree(gone)
    keep(Place(str(root)))
    await until_lost(tier)
    await lender.keep(tier, keys[:5])
    await follower.until(lambda: follower.held.isdisjoint(keys[5:]))
    assert await lender.recall(tier, keys) == whole(keys[:5]) + ["ChunkMissing"] * 5


async def test_a_keeper_whose_backlog_is_full_is_unavailable(pool, peer, join, monkeypatch):
    """It is stopped, perhaps. That is no error of the configuration, and may pass."""
    place = Place.of_pool(pool)
    os.makedirs(place.directory)
    monkeypatch.setattr(meeting, "START_S", 0.2)
    with place.listen():
        with suppress(BlockingIOError):
            while True:
                peer(place)
        with pytest.raises(BackendUnavailable, match="does not start"):
            await join("memory")


async def test_a_pool_where_others_may_write_is_refused(pool, join):
    """They could meet its engines in the keeper's place, and read all chunks."""
    os.makedirs(directory := Place.of_pool(pool).directory)
    os.chmod(directory, 0o777)
    with pytest.raises(ConfigError, match="another user owns it, or may write there"):
        await join("memory")


def reached(ways, directory, user):
    """Try each of these ways as another user, in a process of its own; return the places of those that were open."""
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        with suppress(Exception):
            os.chdir(directory)
            os.setgroups([])
            os.setgid(user)
            os.setuid(user)
            for at, way in enumerate(ways):
                with suppress(PermissionError):
                    way()
                    os.write(write, bytes([at]))
            os.write(write, b"\xff")  # All were tried.
        os._exit(0)
    os.close(write)
    os.waitpid(child, 0)
    with open(read, "rb") as answer:
        return list(answer.read())


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user for a while")
async def test_a_tenant_reaches_nothing_of_another_tenants_tier(outside, kind, place, root, join, lender):
    root.chmod(0o700)  # As a tier makes it; one that is there keeps its mode.
    await lender.keep(await join(kind), keys_of(3))
    (pid,) = keepers(place)
    parent, name = os.path.split(place.directory)
    os.chmod(parent, 0o755)
    paths = [path.relative_to(parent) for path in Path(place.directory).rglob("*") if path.suffix != ".sock"]
    ways = [place._replace(directory=name).connect, partial(os.kill, pid, 0), partial(os.listdir, f"/proc/{pid}/fd")]
    ways += [partial(os.open, path, os.O_RDONLY) for path in paths]
    assert reached(ways, parent, os.geteuid()) == [*range(len(ways)), 255]
    assert reached(ways, parent, 65_534) == [255]


async def test_a_keeper_keeps_no_pipe_of_the_engine_that_started_it_open(outside, join, pool):
    await join("memory")
    (pid,) = keepers(place := Place.of_pool(pool))
    assert [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in range(3)] == [os.devnull, os.devnull, f"{place}.log"]


async def test_a_keeper_is_started_although_its_log_cannot_be_made(outside, join, pool):
    os.makedirs(f"{Place.of_pool(pool)}.log.1")
    Path(f"{Place.of_pool(pool)}.log").touch()
    await join("memory")
    (pid,) = keepers(Place.of_pool(pool))
    assert os.readlink(f"/proc/{pid}/fd/2") == os.devnull


async def test_an_interpreter_that_cannot_start_is_unavailable(outside, join, monkeypatch):
    monkeypatch.setattr("sys.executable", "/bin/false")
    with pytest.raises(BackendUnavailable, match="cannot be started"):
        await join("memory")


# One capacity.


@contextmanager
def sampled(look):
    """Look every ten milliseconds in the block, from a thread; yield the sums that were seen.

    Files come and go while they are looked at one after the other: a sum is of a look that is confirmed by a second.
    """
    seen, ended = [0], threading.Event()

    def run():
        while not ended.wait(0.01):
            with suppress(FileNotFoundError):
                if (sizes := look()) == look():
                    seen.append(sum(sizes.values()))

    thread = threading.Thread(target=run)
    thread.start()
    yield seen
    ended.set()
    thread.join()


def disk_bytes(root):
    return {path: 512 * os.lstat(path).st_blocks for path in root.rglob("*")}


def memory_bytes():
    taken = {}
    for fd in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if "kvtier-pool" in os.readlink(f"/proc/self/fd/{fd}"):
                status = os.stat(f"/proc/self/fd/{fd}")
                taken[status.st_ino] = 512 * status.st_blocks
    return taken


@pytest.fixture
def small_segments(monkeypatch):
    monkeypatch.setattr(room, "SEGMENT_BYTES_LEAST", 128 << 10)
    monkeypatch.setattr(room, "CLAIM_S", 0.01)


async def test_namespaces_and_row_lengths_stay_within_one_capacity(thorough, kept_by, kind, join, root, small_segments):
    tiers = [
        (await join(kind, row_bytes=row_bytes, model_name=model), Lender(row_bytes))
        for model in ("a", "b", "c")
        for row_bytes in (ROW_BYTES, 3 * ROW_BYTES)
    ]
    with sampled((lambda: disk_bytes(root)) if kind == "fs" else memory_bytes) as seen:
        for turn in range(60):
            for number, (tier, lender) in enumerate(tiers[turn % 3 :] if turn % 10 else tiers):
                keys = keys_of(16, 16 * turn)
                assert set(kinds(await tier.store(lender.writes(keys)))) <= {"NoneType", "NoSpace"}, number
                told = await lender.recall(tier, keys)
                assert all(one in (label(key), "ChunkMissing") for key, one in zip(keys, told, strict=True))
                assert lender.take_back()
    assert CAPACITY_BYTES // 2 < max(seen) <= CAPACITY_BYTES


async def test_a_namespace_keeps_its_fair_part(kept_by, kind, join, small_segments):
    quiet, loud, lender = await join(kind, model_name="a"), await join(kind, model_name="b"), Lender(ROW_BYTES)
    keys = keys_of(CAPACITY_BYTES // 2 // (ROW_BYTES + 4_096) - 24)
    for at in range(0, len(keys), 32):
        await lender.keep(quiet, keys[at : at + 32])
    assert await filled(loud) > len(keys) // 2
    assert await lender.recall(quiet, keys) == whole(keys)


async def take(tier, chunks):
    """Store until the tier has more chunks."""
    lender, keys = Lender(ROW_BYTES), keys_of(2 * CAPACITY_BYTES // ROW_BYTES)
    async with asyncio.timeout(PATIENCE_S):
        while tier.occupancy().chunks <= chunks:
            for at in range(0, len(keys), 16):
                await tier.store(lender.writes(keys[at : at + 16]))
                assert lender.take_back()


async def test_a_namespace_beyond_its_part_gives_to_one_that_comes(kept_by, kind, join, small_segments):
    first, second = await join(kind, model_name="a"), await join(kind, model_name="b")
    alone = await filled(first)
    await take(second, alone // 3)
    await filled(second)
    assert first.occupancy().chunks > alone // 3
    await first.aclose(PATIENCE_S)  # Without an engine it has no part.
    await take(second, 0.9 * alone)


async def test_segments_of_a_namespace_that_nobody_has_opened_go_before_any_chunk(
    keep, root, join, small_segments, tmp_path
):
    place = Place(str(root))
    first, old = keep(place), await join(model_name="old")
    all_of_them = await filled(old)
    await old.aclose(PATIENCE_S)
    first.end()
    keep(place)
    tier = await join(model_name="new")
    assert await filled(tier) >= all_of_them - 8
    assert (len(list(root.glob("old*_segments/*.seg"))), tier.counters().evicted) == (0, 0)
