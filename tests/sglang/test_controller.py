"""SGLang's own controller with its own threads: backups, queries and prefetches at once, also under faults."""

import os
import random
import signal
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import sglang.srt.managers.cache_controller as cache_controller
import torch
from sglang.srt.managers.cache_controller import HiCacheController

from kvtier.errors import ConfigError
from tests.sglang.doors import PAGE_SIZE, WAIT_S, extra_config, filled, flip_a_bit, mha_pool, pages_of, runner_pid

PAGES = 200
TOTAL = int(os.environ.get("KVTIER_SGLANG_PAGES", "4000"))  # `make test-sglang` says 30,000.
DEADLINE_S = 2.0
FIRST, SECOND = torch.arange(2 * PAGES * PAGE_SIZE).split(PAGES * PAGE_SIZE)  # A host pool is twice its device's.
ONE_RANK = SimpleNamespace(tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, attn_dcp_size=1, attn_dcp_rank=0)

cache_controller.get_parallel = lambda: ONE_RANK
cache_controller.is_dp_attention_enabled = lambda: False


@contextmanager
def attached(pool, extra):
    made = HiCacheController.__new__(HiCacheController)
    nothing = ("tp_group", "attn_cp_group", "attn_tp_group", "pp_group", "host_write_staged_tokens_fn")
    vars(made).update(dict.fromkeys((*nothing, "mem_pool_device", "storage_backend", "storage_backend_type")))
    made.host_memory_mode, made.mem_pool_host, made.storage_host_pool = "cache", pool, pool
    made.page_size, made.enable_storage_metrics, made.enable_storage = PAGE_SIZE, True, False
    made.prefetch_hits_sync_groups, made.prefetch_completion_sync_groups = [], []
    made.storage_stop_event = threading.Event()
    made.attach_storage_backend("dynamic", model_name="org/model", storage_backend_extra_config=dict(extra))
    try:
        yield made
    finally:
        made.detach_storage_backend()


def back_up(made, tokens, indices):
    made.write_storage(indices, tokens, cache_controller.get_storage_hash_str(tokens, None, page_size=PAGE_SIZE))


def backed_up(made):
    return made.ack_backup_queue.get(timeout=WAIT_S).completed_tokens // PAGE_SIZE


def prefetch(made, tokens, indices):
    """Prefetch as SGLang's scheduler does; return how many pages came, as its threads acknowledge them."""
    operation = made.prefetch("r", tokens)
    assert made.prefetch_hit_queue.get(timeout=WAIT_S) is operation
    found = operation.storage_hit_count // PAGE_SIZE
    if not found:
        return 0
    operation.host_indices = indices[: found * PAGE_SIZE]
    made.prefetch_buffer.put(operation)
    came = 0
    while not (ack := made.ack_prefetch_queue.get(timeout=WAIT_S)).completed_req:
        came = ack.completed_tokens // PAGE_SIZE
    return came


def loaded_pages(pool, count):
    return pages_of(pool, PAGES + count)[PAGES:]


def test_a_backup_is_prefetched_by_its_prefix_and_a_detach_leaves_no_thread_and_no_process(tmp_path):
    pool, tokens = mha_pool(PAGES), list(range(PAGES * PAGE_SIZE))
    want, threads = pages_of(pool, PAGES), None
    for number in range(3):
        with attached(pool, extra_config(tmp_path)) as made:
            if number == 0:
                back_up(made, tokens, FIRST)
                assert backed_up(made) == PAGES
            assert (prefetch(made, tokens, SECOND), loaded_pages(pool, PAGES)) == (PAGES, want)
            filled(pool)
            assert prefetch(made, tokens[: 70 * PAGE_SIZE] + [7] * PAGE_SIZE * 30, SECOND) == 70
            assert loaded_pages(pool, 70) == want[:70]
            runner = Path(f"/proc/{runner_pid(made.storage_backend)}")
            assert runner.exists()
        threads = threads or threading.active_count()  # Some stay with a process's first attach.
        until = time.monotonic() + WAIT_S
        while runner.exists() or threading.active_count() > threads:
            assert time.monotonic() < until
            time.sleep(0.05)


def test_a_bad_configuration_fails_the_attach_and_the_next_one_succeeds(tmp_path):
    pool = mha_pool(PAGES)
    bad = attached(pool, extra_config(tmp_path, staging_bytes=4_096))  # Less than two batches.
    enough = 256 * len(pages_of(pool, 1)[0])
    with pytest.raises(ConfigError, match=f"staging_bytes: 4,096 given, at least {enough:,} accepted"), bad:
        pass
    with attached(pool, extra_config(tmp_path)) as made:
        assert prefetch(made, [1] * PAGE_SIZE, torch.arange(PAGE_SIZE)) == 0


@pytest.mark.parametrize("fault", ["kills", "damage", "a full tier", "a full disk"])
def test_no_wrong_byte_and_no_hang_under_sglangs_fault_injector_and(fault, request, tmp_path, monkeypatch):
    monkeypatch.setenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE", "0.05")  # SGLang 0.5.22 has no injector.
    monkeypatch.setenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY", "0.002")
    root = request.getfixturevalue("mount")("tmpfs", "size=4m") if fault == "a full disk" else tmp_path
    tier = {"type": "fs", "root": str(root), "capacity_bytes": "40MiB" if fault == "a full tier" else "400MiB"}
    pool, chance = mha_pool(PAGES), random.Random(fault)
    want = pages_of(pool, PAGES)
    moved = stored = loaded = number = 0
    with attached(pool, extra_config(root, secondary_tiers=[tier], deadline_s=DEADLINE_S)) as made:
        before: list[int] = []
        while moved < TOTAL // 4:
            number += 1
            tokens = [number * 1_000_000 + token for token in range(chance.randrange(1, PAGES + 1) * PAGE_SIZE)]
            back_up(made, tokens, FIRST[: len(tokens)])  # While the last round's pages are looked up and loaded.
            if fault == "kills" and number % 10 in (0, 3):  # The third round after a kill waits for the next runner.
                pid = runner_pid(made.storage_backend)
                if number % 10 == 0:
                    time.sleep(chance.uniform(0, 0.03))  # At some moment of the backup, not for something.
                    os.kill(pid, signal.SIGKILL)
            if fault == "damage" and number % 3 == 0:
                for path in filter(is_segment, root.rglob("*")):
                    flip_a_bit(path, chance.randrange(path.stat().st_size))
            pool.kv_buffer[:, SECOND] = 0  # A page that did not come must not look like one that came before.
            came = prefetch(made, before, SECOND) if before else 0
            assert loaded_pages(pool, came) == want[:came], number
            before = tokens
            moved, stored, loaded = moved + len(tokens) // PAGE_SIZE, stored + backed_up(made), loaded + came
        assert made.ack_backup_queue.empty()
    assert loaded > moved // 10 if fault != "a full disk" else stored < moved


def is_segment(path):
    return path.is_file() and path.stat().st_size > 1 << 20
