"""The examples of a fleet: they cannot run here, so the schemas of those who would run them are asked, and kvtier.

What can run does: the servers' command lines, with the secrets that the script makes, before engines as configured.
Mooncake's are run by `tests/mooncake/test_fleet.py`.
"""

import json
import re
import subprocess
from pathlib import Path

import kubernetes_validate
import pytest
import redis
from check_jsonschema import main as check_jsonschema
from click.testing import CliRunner

from kvtier.engine.manager import TieringOffloadingManager
from kvtier.settings.fields import struct_fields
from tests.docs import fleet
from tests.docs.fleet import COMPOSE, ENGINES, FLEET, MANIFESTS, NODE, NODES_ENGINE, PAGE, ROOT, SHARED
from tests.docs.tables import built
from tests.docs.test_compatibility import known_to_the_door_of
from tests.engine.kit import at_rest, found, put
from tests.redis.servers import RedisServer

KUBERNETES = ["1.31.0", "1.37.0"]  # The oldest and the newest that are tried.
DOCKERFILES = sorted(FLEET.glob("*.Dockerfile"))
BESIDE_BYTES = 4 << 30  # What vLLM keeps in /dev/shm besides the primary, at most.
HOST_BYTES = 32 << 30  # What an engine takes of the host besides /dev/shm: Python, CUDA, weights in transit.
REQUESTS_S = 60  # For running requests to end.
CLOSES = 2  # A tier that hangs is waited for twice as long as `close_s`.
SERVER_SHARE = 1.1  # Of what a server may keep: connections' buffers and fragments come on top.

every_compose_file = pytest.mark.parametrize("path", COMPOSE, ids=[path.name for path in COMPOSE])
every_manifest = pytest.mark.parametrize("path", MANIFESTS, ids=[path.name for path in MANIFESTS])


@every_compose_file
def test_a_compose_file_is_one_by_the_compose_specification(path):
    ran = CliRunner().invoke(check_jsonschema, ["--builtin-schema", "vendor.compose-spec", str(path)])
    assert ran.exit_code == 0, ran.output


@pytest.mark.parametrize("version", KUBERNETES)
@pytest.mark.parametrize("path", [*MANIFESTS, NODE, SHARED], ids=lambda path: path.name)
def test_a_manifest_is_one_by_the_schemas_of_kubernetes(path, version):
    for one in fleet.objects(path):
        kubernetes_validate.validate(one, version, strict=True)
    assert path is not NODE or version.rpartition(".")[0] in (ROOT / "docs/how-to/fleet.md").read_text()


@pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: engine.where)
def test_an_engine_is_one_that_kvtier_accepts_with_secrets_in_mounted_files(engine):
    (local, on_drive), (remote, options) = engine.tiers
    assert (local, engine.connector["kv_connector"]) == ("fs", "KVTierConnector")
    assert engine.where.partition(" ")[0] in PAGE
    assert remote in {"redis", "mooncake"}
    assert options.seal == "aes-256-gcm"
    assert engine.connector["kv_connector_extra_config"]["revision"] == engine.flag("revision")
    given = {name: getattr(options, name) for name in struct_fields(type(options)) if name.endswith(("_file", "_env"))}
    asked = {name: str(path) for name, path in given.items() if path is not None}
    assert asked
    assert set(asked.values()) <= engine.secrets
    assert not any(name.endswith("_env") for name in asked)
    assert Path(on_drive.root).is_relative_to(engine.volume)
    if engine.volume_bytes is not None:
        assert on_drive.capacity_bytes + on_drive.min_free_bytes <= engine.volume_bytes


@pytest.mark.parametrize("engine", [*ENGINES, NODES_ENGINE], ids=lambda engine: engine.where)
def test_an_engine_has_the_memory_and_the_time_that_it_needs(engine):
    assert engine.shm_bytes >= engine.config.cpu_bytes_to_use + BESIDE_BYTES
    assert engine.memory_bytes >= engine.shm_bytes + HOST_BYTES
    timeout_s = int(engine.flag("shutdown-timeout"))  # vLLM kills its engine after it, however far the engine is.
    assert timeout_s >= REQUESTS_S + CLOSES * engine.config.limits.close_s
    assert engine.patience_s > timeout_s


def test_a_server_has_memory_for_more_than_it_keeps():
    services = [one for path in COMPOSE for one in fleet.compose(path)["services"].values()]
    given = [(one["command"], fleet.size(one["mem_limit"])) for one in services]
    for path in MANIFESTS:
        given += [
            (one["args"], fleet.size(one["resources"]["limits"]["memory"])) for _, _, one in fleet.workloads(path)
        ]
    servers = [(kept_bytes(command), limit) for command, limit in given if kept_bytes(command)]
    assert servers
    assert all(limit >= kept * SERVER_SHARE for kept, limit in servers)


def kept_bytes(command):
    if "--maxmemory" in command:
        return fleet.size(command[command.index("--maxmemory") + 1])
    segments = [one.partition("=")[2] for one in command if one.startswith("--global_segment_size=")]
    return fleet.size(segments[0]) if segments else 0


@every_compose_file
def test_a_compose_file_refers_to_what_it_has(path, made):
    whole = fleet.compose(path)
    for name, service in whole["services"].items():
        assert set(service.get("depends_on", ())) <= whole["services"].keys(), name
        assert set(service.get("secrets", ())) <= whole["secrets"].keys(), name
        assert set(service.get("networks", ())) <= whole.get("networks", {}).keys(), name
        named = {one.partition(":")[0] for one in service.get("volumes", ())}
        assert {one for one in named if not one.startswith("/")} <= whole["volumes"].keys(), name
        for image in (service["build"]["dockerfile"],) if "build" in service else ():
            assert (path.parent / service["build"]["context"] / image).resolve() in DOCKERFILES
    for secret in whole["secrets"].values():
        assert (made / Path(secret["file"]).name).is_file()


@every_compose_file
def test_two_engines_of_a_compose_file_differ_in_their_places_and_share_the_remote_tier_alone(path):
    services = fleet.compose(path)["services"]
    engines = list(fleet.in_compose(path))
    one, other = (engine.connector for engine in engines)
    for each, name in ((one, "engine-a"), (other, "engine-b")):
        assert each["kv_connector_extra_config"]["secondary_tiers"][1].pop("local_host", name) == name
    assert one == other
    own = [services[engine.where.split()[1]] for engine in engines]
    assert len({each["volumes"][0] for each in own}) == len({str(each["deploy"]) for each in own}) == 2
    for engine, service in zip(engines, own, strict=True):
        networks = service.get("networks")
        assert all(services[host].get("networks") == networks or networks for host, _ in fleet.addresses(engine))


@every_manifest
def test_a_manifest_refers_to_what_it_has(path, made):
    names = {(one["kind"], one["metadata"]["name"]) for one in fleet.objects(path)}
    assert len(names) == len(fleet.objects(path))
    assert {one["metadata"].get("namespace", "kvtier") for one in fleet.objects(path)} == {"kvtier"}
    for workload, pod, container in fleet.workloads(path):
        claims = {one["metadata"]["name"]: one["spec"] for one in workload["spec"].get("volumeClaimTemplates", ())}
        volumes = {volume["name"]: volume for volume in pod.get("volumes", ())}
        assert {mount["name"] for mount in container.get("volumeMounts", ())} == volumes.keys() | claims.keys()
        assert ("Service", workload["spec"].get("serviceName", "-")) in names or workload["kind"] != "StatefulSet"
        assert workload["spec"]["selector"]["matchLabels"].items() <= labels_of(workload).items()
        for spec in claims.values():
            assert ("StorageClass", spec.get("storageClassName")) in names or "storageClassName" not in spec
        for secret in [volume["secret"]["secretName"] for volume in volumes.values() if "secret" in volume]:
            assert all((made / Path(file).name).is_file() for file in fleet.secrets_of_the_page()[secret].values())
        assert all(port in ports_of(container) for port in probed(container))
        known = {variable["name"] for variable in container.get("env", ())}
        assert set(re.findall(r"\$\((\w+)\)", json.dumps(container))) <= known


@every_manifest
def test_services_budgets_and_policies_choose_pods_that_there_are(path):
    pods = [(labels_of(workload), ports_of(container)) for workload, _, container in fleet.workloads(path)]
    for one in fleet.of_kind(path, "Service", "PodDisruptionBudget"):
        selector = one["spec"]["selector"]
        chosen = [ports for labels, ports in pods if selector.get("matchLabels", selector).items() <= labels.items()]
        assert len(chosen) == 1, one
        assert {port["targetPort"] for port in one["spec"].get("ports", ())} <= chosen[0], one
    apps = {labels["app.kubernetes.io/name"] for labels, _ in pods}
    for one in fleet.of_kind(path, "NetworkPolicy"):
        text = json.dumps(one["spec"])
        named = set(re.findall(r'"app.kubernetes.io/name": "([\w-]+)"', text))
        named |= {
            name for names in re.findall(r'"values": \[(.*?)\]', text) for name in re.findall(r'"([\w-]+)"', names)
        }
        assert named <= apps, one
        ports = {port["port"] for rule in one["spec"]["ingress"] for port in rule.get("ports", ())}
        assert ports <= set().union(*(ports for _, ports in pods)), one


@every_manifest
def test_remote_services_are_asked_by_names_that_there_are(path):
    services = {one["metadata"]["name"]: one["spec"] for one in fleet.of_kind(path, "Service")}
    sets = {one["spec"]["serviceName"]: one for one in fleet.of_kind(path, "StatefulSet")}
    for engine in fleet.in_kubernetes(path):
        for host, port in fleet.addresses(engine):
            *pod, service = host.split(".")
            assert port in {one["port"] for one in services[service]["ports"]}
            if pod:
                name, replicas = sets[service]["metadata"]["name"], sets[service]["spec"]["replicas"]
                assert pod[0] in {f"{name}-{index}" for index in range(replicas)}


def labels_of(workload):
    return workload["spec"]["template"]["metadata"]["labels"]


def ports_of(container):
    return {port["name"] for port in container["ports"]}


def probed(container):
    probes = [container[name] for name in ("startupProbe", "readinessProbe", "livenessProbe") if name in container]
    assert len(probes) >= 2
    return {probe[how]["port"] for probe in probes for how in ("httpGet", "tcpSocket") if how in probe}


def test_nothing_secret_stands_in_the_examples():
    for path in MANIFESTS:
        assert not fleet.of_kind(path, "Secret")
    for path in (*COMPOSE, *MANIFESTS):
        assert not re.search(r"(?i)(password|key)(_env)?[\"']?\s*[:=]\s*[\"']?\$?\{?[\w-]{16,}", path.read_text())


def test_images_are_made_of_a_version_that_kvtier_knows_and_of_files_that_are_there():
    (given,) = re.findall(r"^FROM vllm/vllm-openai:v([\d.]+)$", (FLEET / "engine.Dockerfile").read_text(), re.MULTILINE)
    assert given.rpartition(".")[0] in known_to_the_door_of("vLLM")
    examples = "".join(one.read_text() for one in (*COMPOSE, *MANIFESTS))
    for path in DOCKERFILES:
        text = path.read_text()
        assert all(
            (ROOT / one).exists() for line in re.findall(r"^COPY (.*) \S+$", text, re.MULTILINE) for one in line.split()
        )
        (tag,) = re.findall(r"-t (\S+) \.$", text, re.MULTILINE)
        assert tag in examples
        assert f"docker build -f examples/fleet/{path.name} \\\n    -t {tag} ." in PAGE


def test_engines_of_a_node_share_its_directory_as_kvtier_accepts():
    ((kind, options),) = NODES_ENGINE.tiers
    assert (kind, options.layout, options.shared) == ("fs", "files", True)
    assert options.capacity_bytes
    assert NODES_ENGINE.connector["kv_connector_extra_config"]["revision"] == NODES_ENGINE.flag("revision")
    (container,) = fleet.nodes_pod("Deployment")["containers"]
    assert all(port in ports_of(container) for port in probed(container))


def test_every_pod_of_a_node_means_the_same_directory_and_only_engines_write_to_it():
    ((_, options),) = NODES_ENGINE.tiers
    paths, images = set[str](), set[str]()
    for kind in ("Deployment", "DaemonSet"):
        found = fleet.nodes_pod(kind)
        paths |= {volume["hostPath"]["path"] for volume in found["volumes"] if volume["name"] == "nvme"}
        for container in (*found.get("initContainers", ()), *found["containers"]):
            (mount,) = (mount for mount in container["volumeMounts"] if mount["name"] == "nvme")
            assert Path(options.root).is_relative_to(mount["mountPath"])
            assert mount.get("readOnly", False) == (container["name"] == "verify")
            images.add(container["image"].rpartition(":")[0])
    assert len(paths) == 1
    assert images <= {re.search(r"-t (\S+):\S+ \.$", path.read_text(), re.MULTILINE)[1] for path in DOCKERFILES}
    (make,) = fleet.nodes_pod("DaemonSet")["initContainers"]
    assert make["command"][-1] == options.root
    assert f"kvtier verify {options.root} --sample 1%" in fleet.nodes_pod("DaemonSet")["containers"][0]["args"][0]
    assert "runAsUser" not in NODE.read_text(), "all run as the same user: the image's"


@pytest.mark.parametrize("page", ["fleet", "troubleshooting", "monitor", "operate"])
def test_a_page_names_metrics_that_there_are(page):
    known = set(re.findall(r"`(kvtier_\w+)", built("metrics.md")))
    named = set(re.findall(r"`(kvtier_\w+)", (ROOT / "docs" / "how-to" / f"{page}.md").read_text()))
    assert {name.removesuffix("_sum") for name in named} - {"kvtier_", "kvtier_backends"} <= known


@pytest.fixture(scope="module")
def made(outside, tmp_path_factory):
    return fleet.make_secrets(tmp_path_factory.mktemp("fleet") / "secrets")


def test_secrets_that_are_there_are_not_replaced(made):
    before = {path.name: path.read_bytes() for path in made.iterdir()}
    again = subprocess.run(["bash", str(FLEET / "make_secrets.sh"), str(made)], capture_output=True, text=True)
    assert (again.returncode, "are kept" in again.stderr) == (1, True)
    assert {path.name: path.read_bytes() for path in made.iterdir()} == before
    modes = {path.name: path.stat().st_mode & 0o777 for path in made.iterdir()}
    assert modes == {"seal-keys": 0o600, "valkey-password": 0o600, "valkey-users": 0o644}


@pytest.mark.parametrize("path", fleet.of_service("valkey"), ids=lambda path: path.name)
async def test_valkey_as_it_is_started_serves_engines_as_they_are_configured(path, made, tmp_path):
    (engine, *_) = [engine for engine in ENGINES if engine.where.startswith(f"{path.name} ")]
    servers = [start(fleet.command_of(path, "valkey"), made, tmp_path) for _ in fleet.addresses(engine)]
    url = f"redis://kvtier@{','.join(server.address for server in servers)}"
    try:
        first, second = (fleet.here(engine, made, tmp_path / one, url=url) for one in "ab")
        async with TieringOffloadingManager.open(first) as one:
            assert await put(one, range(32)) == 32
            assert await at_rest(one)
        async with TieringOffloadingManager.open(second) as another:
            assert await found(another, range(32)) == 32
        for server in servers:
            with server.client() as watching, pytest.raises(redis.exceptions.NoPermissionError):
                watching.keys("*")
            with redis.Redis(port=server.port) as nobody, pytest.raises(redis.exceptions.AuthenticationError):
                nobody.ping()
    finally:
        for server in servers:
            server.kill()


def start(command, made, folder):
    """Start a server as the example does, but for its address and for where its secrets are."""
    program, *given = command
    arguments = dict(zip(given[::2], given[1::2], strict=True))
    users = made / Path(arguments.pop("--aclfile")).name
    assert (program, arguments.pop("--bind"), arguments.pop("--port")) == ("valkey-server", "0.0.0.0", "6379")
    flat = [word for pair in arguments.items() for word in pair]
    return RedisServer(folder, *flat, "--aclfile", str(users), username="watch", password="none").start()
