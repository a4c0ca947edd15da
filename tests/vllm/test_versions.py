"""Both versions of vLLM that are known: 0.32 as installed here, 0.33 as far as its Python sources go without a GPU.

The CUDA build of 0.33 is newer than any that runs without a GPU. What calls kvtier in it is Python, and runs here as it
is: its scheduler, its connector in both roles, its stats, around a model that is a hash (`mini_engine`).
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SOURCES_033 = os.environ.get("VLLM_033")  # A folder with the Python files of the 0.33 wheel; `make test-vllm` has one.


@pytest.fixture(scope="module")
def report(llama: str, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Any]]:
    """What one version says of everything, asked once."""

    @cache
    def ask(version: str) -> dict[str, Any]:
        folder = tmp_path_factory.mktemp(f"vllm-{version}")
        command = [sys.executable, "-W", "ignore", str(HERE / "version_report.py"), llama, str(folder)]
        done = subprocess.run(command, env=environment(folder, version), capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-4_000:]
        return json.loads(done.stdout.splitlines()[-1])

    return ask


def environment(folder: Path, version: str) -> dict[str, str]:
    """Return an environment in which `import vllm` gives this version."""
    path = [str(ROOT), str(ROOT / "backends")]
    if version == "0.33":
        if SOURCES_033 is None:
            pytest.skip("VLLM_033 names no folder with vLLM 0.33's Python files (make test-vllm has one)")
        path.insert(0, SOURCES_033)
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(path),
        "VLLM_CACHE_ROOT": str(folder / "cache"),
        "VLLM_LOGGING_LEVEL": "ERROR",
    }


@pytest.mark.parametrize("version", ["0.32", "0.33"])
def test_every_method_takes_what_vllm_passes(report, version):
    assert report(version)["version"].startswith(version)
    assert report(version)["mismatches"] == []


@pytest.mark.parametrize("version", ["0.32", "0.33"])
def test_vllm_hears_of_stores_that_failed_and_were_not_tried_again(report, version):
    """From 0.33 on: it describes what it sends for, and forgets it then."""
    *failed, stored = report(version)["failed stores"]
    assert stored == [[3], False, False]
    assert failed == ([[[2], True, True]] if version == "0.33" else [])


@pytest.mark.parametrize("version", ["0.32", "0.33"])
def test_the_prompts_that_vllm_computes_are_noted_step_by_step(report, version):
    assert report(version)["prefill noted"] == [1_000] * 3


@pytest.mark.parametrize("version", ["0.32", "0.33"])
@pytest.mark.parametrize("door", ["first", "second"])
def test_vllms_own_scheduler_and_connector_find_right_bytes(report, version, door):
    found = report(version)["doors"][door]
    assert found["wrong_blocks"] == 0
    hits = dict(found["hits"])
    assert hits.pop("new cold") == [0] * 4
    assert hits == dict.fromkeys(hits, [992] * 4)
    metrics = found["metrics"]
    assert "kvtier_tier_loaded_total{" in metrics
    if version == "0.33":
        facts = [line for line in metrics.splitlines() if line.startswith("vllm:kv_offload_config_info{")]
        tier = {"first": "0:fs", "second": "1:KVTierSecondaryTier"}[door]
        assert any(f'tier="{tier}",type="fs"' in line and 'sharing="' in line for line in facts), facts
