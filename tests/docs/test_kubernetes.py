"""The example of engines that share a node's directory: Kubernetes and kvtier accept it, and its sizes fit each other.

Those of a fleet have tests of their own (`test_fleet.py`).
"""

import re
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest

from tests.docs.fleet import FLEET, ROOT, Engine, objects, of_kind, size
from tests.docs.test_fleet import BESIDE_BYTES, HOST_BYTES, KUBERNETES, ports_of, probed

EXAMPLES = sorted((ROOT / "examples" / "kubernetes").glob("*.yaml"))
NODE = ROOT / "examples" / "kubernetes" / "node.yaml"
PAGE = (ROOT / "docs" / "how-to" / "kubernetes.md").read_text()
CLOSES = 2  # A tier that hangs is waited for twice as long as `close_s`.


def pod(kind: str) -> dict[str, Any]:
    (found,) = of_kind(NODE, kind)
    return found["spec"]["template"]["spec"]


def engine() -> Engine:
    found = pod("Deployment")
    (container,) = found["containers"]
    volumes = {volume["name"]: volume for volume in found["volumes"]}
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounts["shm"] == "/dev/shm"
    return Engine(
        where=NODE.name,
        arguments=container["args"],
        secrets=set(),
        volume=mounts["nvme"],
        volume_bytes=None,
        shm_bytes=size(volumes["shm"]["emptyDir"]["sizeLimit"]),
        memory_bytes=size(container["resources"]["limits"]["memory"]),
        patience_s=found["terminationGracePeriodSeconds"] - container["lifecycle"]["preStop"]["sleep"]["seconds"],
    )


@pytest.mark.parametrize("version", KUBERNETES)
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example_is_one_by_the_schemas_of_kubernetes_and_the_page_names_it(path: Path, version: str) -> None:
    for one in objects(path):
        kubernetes_validate.validate(one, version, strict=True)
    assert f"examples/kubernetes/{path.name}" in PAGE
    assert version.rpartition(".")[0] in PAGE


def test_engines_of_a_node_share_its_directory_as_kvtier_accepts() -> None:
    ((kind, options),) = engine().tiers
    assert (kind, options.layout, options.shared) == ("fs", "files", True)
    assert options.capacity_bytes
    extra = engine().connector["kv_connector_extra_config"]
    assert extra["revision"] == engine().flag("revision")


def test_every_pod_means_the_same_directory_and_only_engines_write_to_it() -> None:
    (_, options) = engine().tiers[0]
    paths = set[str]()
    for kind in ("Deployment", "DaemonSet"):
        found = pod(kind)
        (path,) = (volume["hostPath"]["path"] for volume in found["volumes"] if volume["name"] == "nvme")
        for container in (*found.get("initContainers", ()), *found["containers"]):
            (mount,) = (mount for mount in container["volumeMounts"] if mount["name"] == "nvme")
            assert Path(options.root).is_relative_to(mount["mountPath"])
            assert mount.get("readOnly", False) == (container["name"] == "verify")
        paths.add(path)
    assert len(paths) == 1
    (make,) = pod("DaemonSet")["initContainers"]
    assert make["command"][-1] == options.root
    assert f"kvtier verify {options.root} --sample 1%" in pod("DaemonSet")["containers"][0]["args"][0]
    assert "runAsUser" not in NODE.read_text(), "all run as the same user: the image's"


def test_its_sizes_and_times_fit_each_other_as_the_page_says() -> None:
    one = engine()
    assert one.shm_bytes >= one.config.cpu_bytes_to_use + BESIDE_BYTES
    assert one.memory_bytes >= one.shm_bytes + HOST_BYTES
    assert one.patience_s > int(one.flag("shutdown-timeout")) + CLOSES * one.config.limits.close_s
    (container,) = pod("Deployment")["containers"]
    assert all(port in ports_of(container) for port in probed(container))


def test_its_images_are_those_that_the_fleets_dockerfiles_make() -> None:
    made = {re.search(r"-t (\S+):\S+ \.$", path.read_text(), re.MULTILINE)[1] for path in FLEET.glob("*.Dockerfile")}
    used = {
        container["image"].rpartition(":")[0]
        for kind in ("Deployment", "DaemonSet")
        for container in (*pod(kind).get("initContainers", ()), *pod(kind)["containers"])
    }
    assert used <= made


def test_the_page_names_alerts_by_metrics_that_there_are() -> None:
    known = set(re.findall(r"`(kvtier_\w+)`", (ROOT / "docs" / "reference" / "metrics.md").read_text()))
    assert set(re.findall(r"`(kvtier_\w+)", PAGE)) <= known
