"""A newer vLLM, as far as its Python sources go without a GPU; 0.32 is installed, and all other tests run in it.

The CUDA build of 0.33 is newer than any that runs without a GPU. What calls kvtier in it is Python, and runs here as it
is: its scheduler, its connector in both roles, its stats, around a model that is a hash (`mini_engine`).
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.vllm.calls import told_of_failed_stores

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SOURCES = os.environ.get("VLLM_NEWER")  # A folder `vllm-VERSION` with a wheel's Python files; `make test-vllm` has one.


@pytest.fixture(scope="module")
def report(llama, tmp_path_factory):
    if SOURCES is None:
        pytest.skip("VLLM_NEWER names no folder with a newer vLLM's Python files (make test-vllm has one)")
    folder = tmp_path_factory.mktemp("newer")
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([SOURCES, str(ROOT), str(ROOT / "backends")]),
        "VLLM_CACHE_ROOT": str(folder / "cache"),
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    command = [sys.executable, "-W", "ignore", str(HERE / "mini_engine.py"), llama, str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4_000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_kvtier_fits_the_newer_version(report):
    assert SOURCES is not None
    assert report["version"].startswith(Path(SOURCES).name.removeprefix("vllm-"))


def test_vllm_hears_of_stores_that_failed_and_were_not_tried_again(report):
    """From 0.33 on: it describes what it sends for, and forgets it then."""
    assert report["failed stores"] == [[[2], True, True], [[3], False, False]]
    assert told_of_failed_stores() == [([3], False, False)]


def test_the_prompts_that_vllm_computes_are_noted_step_by_step(report):
    assert report["prefill noted"] == [1_000] * 3


@pytest.mark.parametrize(("door", "tier"), [("first", "0:fs"), ("second", "1:KVTierSecondaryTier")])
def test_vllms_own_scheduler_and_connector_find_right_bytes(report, door, tier):
    found = report["doors"][door]
    assert found["wrong_blocks"] == 0
    hits = dict(found["hits"])
    assert (hits.pop("new cold"), hits) == ([0] * 4, dict.fromkeys(hits, [992] * 4))
    metrics = found["metrics"]
    assert "kvtier_tier_loaded_total{" in metrics
    facts = [line for line in metrics.splitlines() if line.startswith("vllm:kv_offload_config_info{")]
    assert any(f'tier="{tier}",type="fs"' in line and 'sharing="' in line for line in facts), facts
