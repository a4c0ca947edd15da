"""Data-parallel ranks and servers that share a pool and a directory: what one has computed, the others load."""

import runpy
from contextlib import suppress

import psutil
import pytest

from tests.docs import readme
from tests.remote.servers import until
from tests.vllm.test_examples import EXAMPLES, environment_in
from tests.vllm.test_readme import OTHER, PROMPT, PROMPT_HITS, TIER, asked, counted, served

POOL = '[{"type": "memory", "shared": true, "capacity_bytes": "64M"}, {"type": "fs"'
SHARED = readme.serve().replace(TIER, f'{TIER}, "layout": "segments", "shared": true').replace('[{"type": "fs"', POOL)
FIRST, SECOND = ({"X-data-parallel-rank": str(rank)} for rank in range(2))


@pytest.fixture
def folder(tmp_path):
    runpy.run_path(str(EXAMPLES / "vllm_tiny_model.py"))["save_tiny_model"](tmp_path / "model")
    yield tmp_path
    for process in psutil.process_iter():  # Keepers outlive all servers, and a server's engines a test that fails.
        with suppress(psutil.Error):
            if process.environ().get("TMPDIR") == str(tmp_path):
                process.kill()


def until_counted(server, name, *labels):
    """Ask until a metric has all of a prompt's chunks: engines tell metrics when they step."""
    until(lambda: asked(server, "w1") and counted(server.address, name, "0:memory", *labels) == PROMPT_HITS // 32)


def test_what_a_rank_has_computed_is_a_hit_in_the_other_in_another_server_and_after_all_were_killed(folder):
    environment = environment_in(folder) | {"XDG_RUNTIME_DIR": str(folder)}
    with served(folder, "ranks", f"{SHARED} --data-parallel-size 2", environment) as ranks:
        text, cached = asked(ranks, PROMPT, **FIRST)
        until_counted(ranks, "kvtier_tier_stored_total")
        assert asked(ranks, PROMPT, **SECOND) == (text, PROMPT_HITS)
        with served(folder, "another", SHARED, environment) as another:
            other, cached = asked(another, OTHER)
            assert (asked(another, PROMPT), cached) == ((text, PROMPT_HITS), 0)
            until_counted(another, "kvtier_tier_stored_total")
            assert asked(ranks, OTHER, **FIRST) == (other, PROMPT_HITS)
            until_counted(another, "kvtier_tier_reported_total", "from_others")
            for engine in (engines := psutil.Process().children(recursive=True)):
                engine.kill()
            psutil.wait_procs(engines)
    with served(folder, "again", SHARED, environment) as again:
        assert [asked(again, prompt) for prompt in (PROMPT, OTHER)] == [(text, PROMPT_HITS), (other, PROMPT_HITS)]
        assert counted(again.address, "kvtier_tier_loaded_total", "0:memory") == 2 * PROMPT_HITS // 32
