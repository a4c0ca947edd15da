"""Both versions of vLLM that are known: 0.32 as installed here, 0.33 as far as its Python sources go without a GPU.

The CUDA build of 0.33 is newer than any that runs without a GPU. What calls kvtier in it is Python, and runs here as it
is: its scheduler, its connector in both roles, its stats, around a model that is a hash (`mini_engine`).
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SOURCES_033 = os.environ.get("VLLM_033")  # A folder with the Python files of the 0.33 wheel; `make test-vllm` has one.

SIGNATURES = """
import inspect, json, vllm
from vllm.v1.kv_offload import base
from vllm.v1.kv_offload.tiering.base import SecondaryTierManager
from kvtier.integrations.vllm import KVTierOffloadingSpec, KVTierSecondaryTier
from kvtier.integrations.vllm.manager import VllmManager
from kvtier.integrations.vllm.worker import VllmWorker
pairs = {KVTierOffloadingSpec: base.OffloadingSpec, VllmManager: base.OffloadingManager,
         VllmWorker: base.OffloadingWorker, KVTierSecondaryTier: SecondaryTierManager}
wrong = []
for ours, theirs in pairs.items():
    wrong += [f"{ours.__name__} lacks {name}" for name in getattr(ours, "__abstractmethods__", ())]
    for name, method in inspect.getmembers(theirs, callable):
        mine = getattr(ours, name)
        if name.startswith("__") or mine is method:
            continue
        wanted = [p for p in inspect.signature(method).parameters.values()]
        given = inspect.signature(mine).parameters
        wrong += [f"{ours.__name__}.{name} has no {p.name}" for p in wanted if p.name not in given]
        wrong += [f"{ours.__name__}.{name} needs {p.name}" for p in given.values()
                  if p.default is p.empty and p.name not in {w.name for w in wanted}]
print(json.dumps([vllm.__version__, wrong]))
"""


def environment(tmp_path: Path, version: str) -> dict[str, str]:
    """Return an environment in which `import vllm` gives this version."""
    path = [str(ROOT), str(ROOT / "backends")]
    if version == "0.33":
        if SOURCES_033 is None:
            pytest.skip("VLLM_033 names no folder with vLLM 0.33's Python files (make test-vllm has one)")
        path.insert(0, SOURCES_033)
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(path),
        "VLLM_CACHE_ROOT": str(tmp_path / "cache"),
        "VLLM_LOGGING_LEVEL": "ERROR",
    }


def run(command: list[str], environment: dict[str, str]) -> list | dict:
    done = subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4_000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("version", ["0.32", "0.33"])
def test_every_method_takes_what_vllm_passes(tmp_path, version):
    found, wrong = run(["-W", "ignore", "-c", SIGNATURES], environment(tmp_path, version))
    assert found.startswith(version)
    assert wrong == []


@pytest.mark.parametrize("version", ["0.32", "0.33"])
@pytest.mark.parametrize("door", ["first", "second"])
def test_vllms_own_scheduler_and_connector_find_right_bytes(llama, disk, tmp_path, version, door):
    report = run([str(HERE / "mini_engine.py"), llama, str(disk), door], environment(tmp_path, version))
    assert report["version"].startswith(version)
    assert report["wrong_blocks"] == 0
    assert report["hits"].pop("new cold") == [0] * 4
    assert report["hits"] == dict.fromkeys(report["hits"], [992] * 4)
    metrics = report["metrics"]
    assert "kvtier_tier_loaded_total{" in metrics
    if version == "0.33":
        facts = [line for line in metrics.splitlines() if line.startswith("vllm:kv_offload_config_info{")]
        tier = {"first": "0:fs", "second": "1:KVTierSecondaryTier"}[door]
        assert any(f'tier="{tier}",type="fs"' in line and 'sharing="' in line for line in facts), facts
