"""Pages go to a tier and come back as they were, in every layout and from every kind of pool; no call raises or hangs.

Many are promises that SGLang's own CPU tests check of its storage back ends; docs/how-to/sglang.md has what differs
on purpose.
"""

import os
import signal
import threading
import time
from itertools import product
from types import SimpleNamespace
from uuid import uuid4

import pytest
from sglang.srt.managers.cache_controller import HiCacheController
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageExtraInfo, PoolHitPolicy, PoolName, PoolTransferResult

from tests.sglang.doors import LAYOUTS, filled, mha_pool, mla_pool, new_keys, pages_of, runner_pid, slots, transfer

MANY = 300  # More than one batch, and more than the staging rows.
BATCH = 128
PAGES = 8
ALL, YES, NO = slots(range(PAGES)), [True] * PAGES, [False] * PAGES
HANG_S = 25.0  # A machine under load may take its time; transfers that each had a deadline of their own take longer.


@pytest.fixture
def keys():
    return [f"page-{uuid4().hex}-{page}" for page in range(PAGES)]  # SGLang's tests use such names, too.


@pytest.fixture
def stored(doors, keys):
    pool = mha_pool(PAGES)
    door = doors.open(pool)
    assert door.batch_set_v1(keys, ALL) == YES
    return door, pool


@pytest.fixture
def hybrid(doors):
    tier = {"type": "fs", "root": str(doors.root), "capacity_bytes": "64MiB", "shared": True}

    def open_(layout="page_first", **rank):
        pools = {PoolName.KV: mha_pool(PAGES, layout), PoolName.MAMBA: mha_pool(PAGES, layout)}
        door = doors.open(pools[PoolName.KV], {"secondary_tiers": [tier]}, **rank)
        for name, pool in pools.items():
            door.register_mem_host_pool_v2(pool, name)
        return door, pools

    return open_


@pytest.mark.parametrize(
    ("make", "layout", "batch"), [*product([mha_pool, mla_pool], LAYOUTS, [BATCH]), (mha_pool, "page_first", MANY)]
)
def test_pages_come_back_byte_for_byte_after_a_restart(doors, make, layout, batch):
    pool, keys = make(MANY, layout), new_keys(MANY)
    mla = {"is_mla_model": True, "tp_size": 2} if make is mla_pool else {}
    parts = [range(start, min(start + batch, MANY)) for start in range(0, MANY, batch)]
    door = doors.open(pool, **mla)
    for part in parts:
        assert all(door.batch_set_v1([keys[page] for page in part], slots(part)))
    want = pages_of(pool, MANY)
    doors.close()
    filled(pool)
    door = doors.open(pool, **mla, tp_rank=1 if mla else 0)  # MLA's rank 0 stores for all.
    assert door.batch_exists(keys[:batch]) == batch
    for part in parts:
        assert all(door.batch_get_v1([keys[page] for page in part], slots(part)))
    assert pages_of(pool, MANY) == want


def test_a_missing_page_is_false_at_its_place_ends_a_prefetch_and_leaves_the_pool_as_it_was(stored, keys):
    door, pool = stored
    asked = [*keys[:3], *new_keys(1), *keys[4:]]
    before = pages_of(pool, PAGES)[3]
    assert door.batch_exists(asked, HiCacheStorageExtraInfo(prefix_keys=[])) == 3
    assert door.batch_get_v1(asked, ALL) == [True] * 3 + [False] + [True] * 4
    assert pages_of(pool, PAGES)[3] == before
    made = SimpleNamespace(storage_backend=door, storage_host_pool=pool, page_size=16)
    operation = SimpleNamespace(request_id="r", is_terminated=lambda: False)
    assert HiCacheController._page_get_zero_copy(made, operation, asked, ALL) == 3


def test_a_key_that_is_stored_already_is_acknowledged_and_keeps_its_bytes(stored, keys):
    door, pool = stored
    want = pages_of(pool, PAGES)
    filled(pool)
    assert door.batch_set_v1(keys, ALL) == YES
    assert door.batch_get_v1(keys, ALL) == YES
    assert pages_of(pool, PAGES) == want


def test_every_call_ends_by_its_deadline_while_the_runner_is_stopped(doors, stored, keys):
    doors.close()
    door = doors.open(stored[1], {"deadline_s": 1.0})
    pid = runner_pid(door)
    os.kill(pid, signal.SIGSTOP)
    try:
        for call, given, answer in (
            (door.batch_get_v1, (keys, ALL), NO),
            (door.batch_set_v1, (new_keys(PAGES), ALL), NO),
            (door.batch_exists, (new_keys(PAGES),), 0),
            (door.batch_get_v2, ([transfer(PoolName.KV, keys)] * 30,), {PoolName.KV: NO}),  # One deadline for all.
        ):
            begun = time.monotonic()
            assert call(*given) == answer
            assert time.monotonic() - begun < HANG_S
    finally:
        os.kill(pid, signal.SIGCONT)


def test_calls_after_the_end_answer_no_instead_of_raising(stored, keys):
    door, _ = stored
    door.close()
    assert door.batch_exists(keys) == 0
    assert door.batch_get_v1(keys, ALL) == NO
    assert door.batch_set_v1(keys, ALL) == NO
    assert not door.exists(keys[0])


def test_sglangs_own_metrics_get_pages_and_rates(stored, keys):
    door, _ = stored
    assert door.batch_get_v1(keys, ALL) == YES
    told = door.get_stats()
    assert (told.backup_pgs, told.prefetch_pgs) == ([PAGES], [PAGES])
    assert all(speed > 0 for speed in (*told.backup_bandwidth, *told.prefetch_bandwidth))
    assert door.get_stats().backup_pgs == []


def test_a_forked_child_answers_no_at_once_though_a_call_was_in_progress(stored, keys):
    door, _ = stored
    end = threading.Event()

    def ask():
        while not end.is_set():
            door.batch_exists(keys)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        for _ in range(20):
            child = os.fork()
            if not child:
                signal.alarm(60)
                os._exit(any(door.batch_get_v1(keys, ALL)) or bool(door.batch_exists(keys)))
            assert os.waitpid(child, 0)[1] == 0
    finally:
        end.set()
        thread.join()
    assert door.batch_get_v1(keys, ALL) == YES


@pytest.mark.parametrize(("axis", "mla"), [("tp", False), ("attn_cp", False), ("pp", False), ("tp", True)])
def test_ranks_do_not_share_pages_nor_mambas_states_beside_mla(hybrid, keys, axis, mla):
    name = PoolName.MAMBA if mla else PoolName.KV
    ranks = [hybrid(**{f"{axis}_rank": rank, f"{axis}_size": 2}, is_mla_model=mla) for rank in (0, 1)]
    want = [pages_of(pools[name], PAGES) for _, pools in ranks]
    assert want[0] != want[1]
    for door, _ in ranks:
        assert door.batch_set_v2([transfer(name, keys)]) == {name: YES}
    for (door, pools), pages in zip(reversed(ranks), reversed(want), strict=True):
        filled(pools[name])
        assert door.batch_get_v2([transfer(name, keys)]) == {name: YES}
        assert pages_of(pools[name], PAGES) == pages
        assert door.clear()  # The other rank's pages stay.


@pytest.mark.parametrize("layout", LAYOUTS)
def test_several_pools_round_trip_is_bit_exact_and_kv_pages_are_those_of_a_single_one(hybrid, keys, layout):
    door, pools = hybrid(layout)
    both = [transfer(name, keys) for name in pools]
    want = [pages_of(pool, PAGES) for pool in pools.values()]
    assert door.batch_set_v2(both) == dict.fromkeys(pools, YES)
    assert door.batch_exists(keys) == PAGES
    filled(pools[PoolName.MAMBA])
    for load, given, answer in (
        (door.batch_get_v2, (both,), dict.fromkeys(pools, YES)),
        (door.batch_get_v1, (keys, ALL), YES),
    ):
        filled(pools[PoolName.KV])
        assert load(*given) == answer
        assert [pages_of(pool, PAGES) for pool in pools.values()] == want


@pytest.mark.parametrize(
    ("policy", "window", "held", "pages", "boundary"),
    [
        (PoolHitPolicy.ALL_PAGES, 4, [0, 1, 3], 2, 2),
        (PoolHitPolicy.TRAILING_PAGES, 1, [1, 2, 3], 4, 4),
        (PoolHitPolicy.TRAILING_PAGES, 1, [1, 2], 3, 3),
        (PoolHitPolicy.TRAILING_PAGES, 2, [1, 3], 0, 0),
        (PoolHitPolicy.TRAILING_PAGES, 2, [0, 3], 1, 1),
    ],
)
def test_a_side_pools_policy_bounds_the_prefix(hybrid, keys, policy, window, held, pages, boundary):
    (door, _), four = hybrid(), keys[:4]
    side = transfer(PoolName.MAMBA, four[-window:], hit_policy=policy)
    assert door.batch_exists_v2(four, [side]) == PoolTransferResult(0, {}, [])
    states = transfer(PoolName.MAMBA, [four[page] for page in held], held)
    assert all(map(all, door.batch_set_v2([transfer(PoolName.KV, four), states]).values()))
    found = door.batch_exists_v2(four, [side])
    assert found.kv_hit_pages == pages
    assert found.extra_pool_hit_pages == {PoolName.KV: 4} | ({PoolName.MAMBA: boundary} if boundary else {})


def test_slots_that_do_not_fit_and_unknown_pools_fail_alone(hybrid, keys):
    door, _ = hybrid()
    bad = [transfer(PoolName.KV, keys, [0]), transfer(PoolName.SWA, keys), transfer(PoolName.MAMBA, keys)]
    for call in (door.batch_set_v2, door.batch_get_v2):
        assert call(bad) == {PoolName.KV: NO, PoolName.SWA: NO, PoolName.MAMBA: YES}
    assert door.batch_exists(keys) == 0
