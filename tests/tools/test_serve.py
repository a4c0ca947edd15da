"""`kvtier serve` runs the keepers of a host's shared tiers: engines meet them, and they are started again."""

import os
import re
import select
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvtier.errors import ConfigError
from kvtier.testing.conformance import Lender
from kvtier.testing.conformance.lender import keys_of, label
from kvtier.tools.top import Reading, engine_now
from kvtier_backends.fs import FsBackend, MemoryBackend
from kvtier_backends.fs.host import meeting
from kvtier_backends.fs.host.meeting import Place
from tests.testing.suites import open_with
from tests.tools.command import KVTIER, check_refusal
from tests.tools.command import run as run_command

__all__ = ["open_with"]

CHUNK_BYTES = 8_192
ROOM_BYTES = 64 << 20
METRICS = Path(__file__).parents[2] / "docs" / "reference" / "metrics.md"
KEYS = keys_of(8)
LENDER = Lender(CHUNK_BYTES)
PATIENCE_S = 60.0
HEAD = 'cpu_bytes_to_use = "1MiB"\nchunk_bytes = "8KiB"\n'


class Service:
    def __init__(self, folder):
        self.root, self._folder = folder / "tier", folder
        shared = f"shared = true\ncapacity_bytes = {ROOM_BYTES}\n"
        fs = f'[[secondary_tiers]]\ntype = "fs"\nroot = "{self.root}"\nlayout = "segments"\n{shared}'
        (folder / "kvtier.toml").write_text(f'{HEAD}[[secondary_tiers]]\ntype = "memory"\npool = "a"\n{shared}{fs}')
        self.places = [Place.of_pool("a"), Place(str(self.root))]
        self.ready = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.ready.bind(str(folder / "notify"))
        self.ready.settimeout(PATIENCE_S)

    def __enter__(self):
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        environment["NOTIFY_SOCKET"] = str(self._folder / "notify")
        command = [*KVTIER, "serve", str(self._folder / "kvtier.toml"), "--port", "0"]
        piped = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(command, env=environment, **piped)
        self.address = self.process.stdout.readline().removeprefix("metrics: ").strip()
        assert self.ready.recv(100) == b"READY=1"
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.communicate()
        self.ready.close()

    def ended(self, number=signal.SIGTERM):
        pidfds = list(map(os.pidfd_open, self.keepers()))
        self.process.send_signal(number)
        status = self.process.wait(PATIENCE_S)
        for pidfd in pidfds:
            assert select.select([pidfd], [], [], PATIENCE_S)[0]
            os.close(pidfd)
        return status

    def up(self):
        return all(self.value("up", place) for place in self.places)

    def keepers(self):
        tasks = Path(f"/proc/{self.process.pid}/task").glob("*/children")
        return [int(pid) for task in tasks for pid in task.read_text().split()]

    def samples(self):
        with urllib.request.urlopen(self.address) as page:
            families = list(text_string_to_metric_families(page.read().decode()))
        return {(each.name, each.labels["keeper"]): each for family in families for each in family.samples}

    def value(self, name, place):
        return self.samples()[f"kvtier_keeper_{name}", str(place)].value


@pytest.fixture
def service(outside, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return Service(tmp_path)


@pytest.fixture
def open_memory(open_with):
    given = {"shared": True, "pool": "a", "capacity_bytes": ROOM_BYTES, "chunk_bytes": CHUNK_BYTES}
    return lambda **fields: open_with(MemoryBackend, **given | fields)


async def test_engines_meet_the_keepers_of_a_service_and_its_metrics_show_them(service, open_memory):
    pool, root = service.places
    with service:
        storing, loading = await open_memory(), await open_memory()
        await LENDER.keep(storing, KEYS)
        assert await LENDER.recall(loading, KEYS) == list(map(label, KEYS))
        wait_until(service.up)
        samples = service.samples()
        assert (service.value("sessions", pool), service.value("sessions", root)) == (2, 0)
        assert (service.value("chunks", pool), service.value("evicted_total", pool)) == (len(KEYS), 0)
        assert 0 < service.value("used_bytes", pool) <= service.value("capacity_bytes", pool) == ROOM_BYTES
        assert samples["kvtier_keeper_session_held", str(pool)].value == 0
        assert {name for name, _ in samples} == set(re.findall(r"`(kvtier_keeper_\w+)`", METRICS.read_text()))
        reading = Reading.of(service.address)
        found = engine_now(service.address, reading._replace(samples=[]), reading._replace(at_s=reading.at_s + 1))
        moved = [(each["stored_per_s"], each["loaded_per_s"]) for each in found.sessions.values()]
        assert sorted(moved) == [(0, len(KEYS)), (len(KEYS), 0)]
        assert all(f"process {os.getpid()}" in name for name in found.sessions)
        await storing.aclose(10)
        await loading.aclose(10)
        assert service.ended() == 0
    assert not any(os.path.exists(f"{place}.sock") for place in service.places)


@pytest.mark.promise("The keeper is killed")
async def test_a_killed_keeper_is_started_again_and_its_segments_are_found(service, open_with):
    given = {"root": str(service.root), "layout": "segments", "shared": True, "capacity_bytes": ROOM_BYTES}
    with service:
        first = await open_with(FsBackend, chunk_bytes=CHUNK_BYTES, **given)
        await LENDER.keep(first, KEYS)
        wait_until(service.up)
        for pid in service.keepers():
            os.kill(pid, signal.SIGKILL)
        told = {service.process.stderr.readline() for _ in service.places}
        said = "the keeper has ended with status -9; it is started again\n"
        assert told == {f"kvtier: {place}: {said}" for place in service.places}
        second = await open_with(FsBackend, chunk_bytes=CHUNK_BYTES, **given)
        assert await LENDER.recall(second, KEYS) == list(map(label, KEYS))
        assert service.value("up", service.root / meeting.NAME) == 1
        assert service.value("sessions", service.root / meeting.NAME) >= 1


@pytest.mark.promise("An engine's options differ from the keeper's")
async def test_an_engine_whose_options_differ_from_the_services_is_refused_by_name(service, open_memory):
    refusal = f"^capacity_bytes: {ROOM_BYTES // 2} given, {ROOM_BYTES} accepted"
    with service, pytest.raises(ConfigError, match=refusal):
        await open_memory(capacity_bytes=ROOM_BYTES // 2)


@pytest.mark.promise("Engines have started a keeper before `kvtier serve`")
def test_a_keeper_that_engines_have_started_is_named_and_the_services_follows_it(service, monkeypatch):
    pool, root = service.places
    monkeypatch.setattr(meeting, "LINGER_S", 0.5)
    with pool.meet() as connected, service:
        assert service.process.stderr.readline() == (
            f"kvtier: {pool}: engines have started a keeper; this service's follows when that has ended\n"
        )
        wait_until(lambda: service.value("up", root))
        assert service.value("up", pool) == 0
        connected.close()
        wait_until(service.up)


def wait_until(true):
    while not true():
        assert select.select([], [], [], 0.05) == ([], [], [])


@pytest.mark.promise("`kvtier serve` is killed")
def test_keepers_end_with_their_service_however_it_ends(service):
    with service:
        wait_until(service.up)
        assert len(service.keepers()) == 2
        assert service.ended(signal.SIGKILL) == -signal.SIGKILL


def test_a_configuration_without_a_shared_tier_is_refused_by_name(tmp_path, capsys):
    path = tmp_path / "kvtier.toml"
    path.write_text(f'{HEAD}[[secondary_tiers]]\ntype = "fs"\nroot = "/tmp"\nshared = true\n')
    assert run_command("serve", path) == 2
    check_refusal(capsys, f"{path}: no tier with a keeper given, memory or segments of fs with shared = true accepted")
