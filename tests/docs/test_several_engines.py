"""The examples of `kvtier serve`: systemd and Kubernetes cannot run here; their checks and kvtier's are asked."""

import configparser
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvtier.config import tier_options
from kvtier.integrations.vllm_options import read_line
from kvtier_backends.fs import FsBackend, MemoryBackend
from tests.docs import fleet
from tests.docs.fleet import ROOT, SHARED

UNIT = ROOT / "examples" / "systemd" / "kvtier.service"
KEEPER_BYTES = 2 << 30  # Of the processes, and of the index of some million chunks.


def places(line, monkeypatch):
    """Return the directories of the keepers' sockets, and the bytes of memory in pools."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run")  # As for root.
    pool, drive = (tier_options(tier, "the example's") for tier in read_line(json.loads(line)).secondary_tiers)
    keepers = MemoryBackend.keeper(pool), FsBackend.keeper(drive)
    assert None not in keepers
    return [Path(keeper.directory) for keeper in keepers], pool.capacity_bytes


def test_pods_share_sockets_directory_and_configuration_and_the_pool_counts_for_its_keeper(monkeypatch):
    (config,) = fleet.of_kind(SHARED, "ConfigMap")
    directories, pool_bytes = places(config["data"]["tiers.json"], monkeypatch)
    keepers, engines = (fleet.nodes_pod(kind, SHARED) for kind in ("DaemonSet", "Deployment"))
    (keeper,), (engine,) = keepers["containers"], engines["containers"]
    for pod, container in ((keepers, keeper), (engines, engine)):
        hosts = {volume["name"]: volume["hostPath"] for volume in pod["volumes"] if "hostPath" in volume}
        mounts = {
            Path(one["mountPath"]): hosts[one["name"]] for one in container["volumeMounts"] if one["name"] in hosts
        }
        for directory in directories:
            (found,) = (mounts[path] for path in mounts if directory.is_relative_to(path))
            assert (found["type"] == "Directory") == (pod is engines)
    assert fleet.size(keeper["resources"]["limits"]["memory"]) >= pool_bytes + KEEPER_BYTES
    assert engine["args"][-2:] == ["--kv-transfer-config", "$(TIERS)"]
    assert engine["env"][0]["valueFrom"]["configMapKeyRef"] == {"name": "tiers", "key": "tiers.json"}
    assert keeper["command"][:3] == ["kvtier", "serve", "/etc/kvtier/tiers.json"]
    assert keeper["image"] == engine["image"]


def test_the_units_keepers_are_where_its_directories_are_and_have_the_memory_that_they_need(monkeypatch):
    unit = configparser.ConfigParser(strict=True)
    unit.optionxform = str
    unit.read(UNIT)
    service = unit["Service"]
    directories, pool_bytes = places((UNIT.parent / "tiers.json").read_text(), monkeypatch)
    assert service["Type"] == "notify"
    assert service["Environment"] == "XDG_RUNTIME_DIR=/run"
    assert directories[0] == Path("/run", service["RuntimeDirectory"])
    assert directories[1].is_relative_to(service["ReadWritePaths"])
    assert fleet.size(service["MemoryMax"]) >= pool_bytes + KEEPER_BYTES // 2
    assert service["ExecStart"].split()[1:] == ["serve", "/etc/kvtier/tiers.json"]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_the_unit_is_one_by_systemds_own_check(outside, tmp_path):
    text = UNIT.read_text().replace("/opt/kvtier/bin/kvtier", sys.executable).replace("User=kvtier", "User=root")
    (tmp_path / UNIT.name).write_text(text)
    checked = subprocess.run(["systemd-analyze", "verify", tmp_path / UNIT.name], capture_output=True, text=True)
    assert (checked.returncode, checked.stderr) == (0, "")
