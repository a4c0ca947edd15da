"""The same random calls on SGLang's HiCacheFile and on kvtier have the same answers and the same bytes."""

import os

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sglang.srt.mem_cache.hicache_storage import HiCacheFile, PoolHitPolicy, PoolName

from tests.sglang.doors import OLD, filled, mha_pool, page_bytes, pages_of, storage_config, transfer

PAGES = 12
KEYS = [f"{index:064x}" for index in range(PAGES)]
SEQUENCES = int(os.environ.get("KVTIER_SGLANG_SEQUENCES", "100"))

keys = st.lists(st.sampled_from(KEYS), min_size=1, max_size=8, unique=True)
calls = st.lists(st.tuples(st.sampled_from(["set", "get", "exists", "window"]), keys), min_size=1, max_size=12)


@pytest.fixture
def pair(doors, tmp_path):
    """One pool for both: its page i is always what key i stands for, as SGLang's hashes promise."""
    pool = mha_pool(PAGES)
    theirs = HiCacheFile(storage_config(extra_config={"file_storage_path": str(tmp_path / "files")}))
    ours = doors.open(pool)
    for storage in (theirs, ours):
        storage.register_mem_pool_host(pool)
        storage.register_mem_host_pool_v2(pool, PoolName.KV)
    return pool, theirs, ours


def test_random_calls_have_the_same_answers(pair):
    pool, theirs, ours = pair
    want, whole = dict(zip(KEYS, pages_of(pool, PAGES), strict=True)), pool.kv_buffer.clone()

    @settings(deadline=None, max_examples=SEQUENCES, suppress_health_check=[HealthCheck.too_slow])
    @given(calls)
    def agree(sequence):
        theirs.clear()
        assert ours.clear()
        for call, chosen in sequence:
            if call == "set":
                pool.kv_buffer.copy_(whole)
                stored = [transfer(PoolName.KV, chosen, map(KEYS.index, chosen))]
                assert ours.batch_set_v2(stored) == theirs.batch_set_v2(stored)
            elif call == "get":
                loaded = [transfer(PoolName.KV, chosen)]
                there = theirs.batch_get_v2(loaded)
                filled(pool)
                assert ours.batch_get_v2(loaded) == there
                for page, (key, came) in enumerate(zip(chosen, there[PoolName.KV], strict=True)):
                    assert not came or page_bytes(pool, page) == want[key]
            elif call == "exists":
                assert ours.batch_exists(chosen) == theirs.batch_exists(chosen)
            else:
                window = [transfer(PoolName.KV, chosen[:2], hit_policy=PoolHitPolicy.TRAILING_PAGES)]
                told = ours.batch_exists_v2(chosen, window)
                if OLD:  # SGLang 0.5.22's HiCacheFile does not list the restorable prefixes.
                    told.restorable_prefix_pages = None
                assert told == theirs.batch_exists_v2(chosen, window)

    agree()
