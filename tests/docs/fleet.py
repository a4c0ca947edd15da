import json
import re
import subprocess
from pathlib import Path
from typing import NamedTuple

import yaml

from kvtier.config import EngineConfig, tier_options
from kvtier.settings.fields import struct_fields
from tests.engine.kit import describe

ROOT = Path(__file__).parents[2]
FLEET = ROOT / "examples" / "fleet"
PAGE = (ROOT / "docs" / "how-to" / "fleet.md").read_text()
COMPOSE = sorted(FLEET.glob("compose.*.yaml"))
NODE = ROOT / "examples" / "kubernetes" / "node.yaml"
SHARED = ROOT / "examples" / "kubernetes" / "shared.yaml"
MANIFESTS = sorted((FLEET / "kubernetes").glob("*.yaml"))
VLLMS_OWN = {"spec_name", "spec_module_path", "blocks_per_chunk", "revision"}  # What no engine without vLLM has.
SIZES = {"": 1, "k": 10, "m": 20, "g": 30, "t": 40}
SECONDS = {"s": 1, "m": 60, "h": 3600}


class Engine(NamedTuple):
    where: str
    arguments: list[str]
    secrets: set[str]  # Paths of files.
    volume: str  # Where the local drive is mounted,
    volume_bytes: int | None  # and how large it is, if the example says so.
    shm_bytes: int
    memory_bytes: int
    patience_s: float  # From SIGTERM to SIGKILL.

    @property
    def connector(self):
        text = self.arguments[self.arguments.index("--kv-transfer-config") + 1]
        return json.loads(text.replace("$(POD_IP)", "10.0.0.7"))

    @property
    def config(self):
        """Return kvtier's configuration, of which vLLM says how long chunks are."""
        extra = self.connector["kv_connector_extra_config"]
        ours = {name: value for name, value in extra.items() if name not in VLLMS_OWN}
        assert ours.keys() <= struct_fields(EngineConfig).keys()
        return EngineConfig.from_dict({"chunk_bytes": "2MiB", **ours}, self.where)

    @property
    def tiers(self):
        tiers = self.config.secondary_tiers
        return [(tier.type, tier_options(tier, f"{self.where} secondary_tiers")) for tier in tiers]

    def flag(self, name):
        (value,) = (one.partition("=")[2] for one in self.arguments if one.startswith(f"--{name}="))
        return value


def compose(path):
    return yaml.safe_load(re.sub(r"\$\{\w+(?::-([^}]*))?\}", lambda found: found[1] or "", path.read_text()))


def objects(path):
    return list(yaml.safe_load_all(path.read_text()))


def of_kind(path, *kinds):
    return [one for one in objects(path) if one["kind"] in kinds]


def workloads(path):
    found = of_kind(path, "StatefulSet", "Deployment")
    pods = [one["spec"]["template"]["spec"] for one in found]
    return [(one, pod, *pod["containers"]) for one, pod in zip(found, pods, strict=True)]


def size(text):
    number, unit = re.fullmatch(r"(\d+)([kmgt]?)i?b?", text, re.IGNORECASE).groups()
    shift = SIZES[unit.lower()]
    return int(number) << shift if unit else int(number)


def duration(text):
    return sum(int(number) * SECONDS[unit] for number, unit in re.findall(r"(\d+)([smh])", text))


def in_compose(path):
    for name, service in compose(path)["services"].items():
        if "--kv-transfer-config" in service["command"]:
            yield Engine(
                where=f"{path.name} {name}",
                arguments=service["command"],
                secrets={f"/run/secrets/{one}" for one in service["secrets"]},
                volume=service["volumes"][0].rpartition(":")[2],
                volume_bytes=None,
                shm_bytes=size(service["shm_size"]),
                memory_bytes=size(service["mem_limit"]),
                patience_s=duration(service["stop_grace_period"]),
            )


def in_kubernetes(path):
    for workload, pod, container in workloads(path):
        if "--kv-transfer-config" not in container["args"]:
            continue
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        claims = {one["metadata"]["name"]: one["spec"] for one in workload["spec"].get("volumeClaimTemplates", ())}
        assert mounts["shm"] == "/dev/shm"
        yield Engine(
            where=f"{path.name} {workload['metadata']['name']}",
            arguments=container["args"],
            secrets={
                f"{mounts[name]}/{key}"
                for name, volume in volumes.items()
                if "secret" in volume
                for key in secrets_of_the_page()[volume["secret"]["secretName"]]
            },
            volume=mounts["nvme"],
            volume_bytes=size(claims["nvme"]["resources"]["requests"]["storage"]) if claims else None,
            shm_bytes=size(volumes["shm"]["emptyDir"]["sizeLimit"]),
            memory_bytes=size(container["resources"]["limits"]["memory"]),
            patience_s=pod["terminationGracePeriodSeconds"] - container["lifecycle"]["preStop"]["sleep"]["seconds"],
        )


def nodes_pod(kind, path=NODE):
    (found,) = of_kind(path, kind)
    return found["spec"]["template"]["spec"]


def secrets_of_the_page():
    commands = re.findall(r"kubectl .*create secret generic (\S+)((?:[\s\\]+--from-file=\S+)+)", PAGE)
    return {name: dict(re.findall(r"--from-file=(\S+?)=(\S+)", files)) for name, files in commands}


def addresses(engine):
    _, options = engine.tiers[1]
    if not hasattr(options, "master"):
        return [tuple(address) for address in options.target().addresses]
    host, _, port = options.master.rpartition(":")
    return [(host, int(port))]


def of_service(name):
    return [path for path in (*COMPOSE, *MANIFESTS) if name in path.name]


def command_of(path, name):
    if path in COMPOSE:
        return compose(path)["services"][name]["command"]
    (container,) = (container for one, _, container in workloads(path) if one["metadata"]["name"] == name)
    return container["args"]


def make_secrets(folder):
    subprocess.run(["bash", str(FLEET / "make_secrets.sh"), str(folder)], check=True)
    return folder


def here(engine, made, folder, **remote):
    """Return the engine's configuration with small chunks, with folders here, and the remote tier's places as given."""
    folder.mkdir()
    local, given = engine.connector["kv_connector_extra_config"]["secondary_tiers"]
    local |= {"root": str(folder / "chunks"), "min_free_bytes": 0, "capacity_bytes": "64MiB"}
    files = {name: str(made / Path(given[name]).name) for name in given if name.endswith("_file")}
    return describe(32, local, given | files | remote, runner="process")


ENGINES = [engine for path in COMPOSE for engine in in_compose(path)]
ENGINES += [engine for path in MANIFESTS for engine in in_kubernetes(path)]
(NODES_ENGINE,) = in_kubernetes(NODE)
