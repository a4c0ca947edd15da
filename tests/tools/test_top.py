import asyncio
import json
import os
import pty
import signal
import socketserver
import subprocess
import sys
import threading
from contextlib import contextmanager, suppress

import jsonschema
from prometheus_client import CollectorRegistry, Counter, Gauge

from kvtier import EngineConfig, TieringOffloadingManager, make_offload_key
from kvtier.tools.top import EngineNow, Reading, engine_now
from tests.docs.tables import hooks
from tests.serving import served
from tests.tools.command import KVTIER, run

CHUNK_BYTES = 16_384


@contextmanager
def engine():
    tier = {"type": "dummy", "name": "slow", "capacity_bytes": "16MiB"}
    config = EngineConfig.from_dict(
        {"cpu_bytes_to_use": "512KiB", "chunk_bytes": CHUNK_BYTES, "runner": "inline", "secondary_tiers": [tier]}
    )
    with asyncio.Runner() as runner:
        manager = TieringOffloadingManager.open(config)
        opened = runner.run(manager.__aenter__())
        try:
            yield opened, runner
        finally:
            runner.run(manager.__aexit__(None, None, None))


def keys(first, count):
    return [make_offload_key((first + number).to_bytes(32, "big")) for number in range(count)]


async def used(tiers, first):
    await tiers.put(keys(first, 40), [bytes(CHUNK_BYTES)] * 40)
    await tiers.drain()
    await tiers.get(keys(first + 30, 10))


def top(capsys, *args):
    status = run("top", *args)
    told = capsys.readouterr()
    return status, told.out, told.err


def test_once_tells_of_a_live_engine_by_its_address(capsys):
    with engine() as (tiers, runner):
        runner.run(used(tiers, 0))
        stats = tiers.stats().primary
        with served(tiers.metrics) as port:
            for address in (port, f"127.0.0.1:{port}", f"http://127.0.0.1:{port}/metrics"):
                status, out, err = top(capsys, address, "--once", "--json", "--interval", "100ms")
                assert (status, err) == (0, "")
                told = json.loads(out)
                jsonschema.validate(told, hooks.schema(EngineNow))
                assert told["address"] == str(address)
                assert told["hit_ratio"] == round(stats.hits / (stats.hits + stats.misses), 4) > 0
                assert told["hit_ratio_now"] is None
                assert told["primary"]["rows"] == 32
                tier, held = told["tiers"]["slow"], tiers.stats().tiers[0]
                assert (told["breakers"], tier["chunks"]) == ({"slow": "closed"}, held.chunks)
                assert (tier["used_bytes"], tier["capacity_bytes"]) == (held.used_bytes, held.capacity_bytes)
                assert tier["stored_bytes_per_s"] == 0.0
            status, out, _ = top(capsys, port, "--once", "--interval", "100ms")
    assert status == 0
    assert f"hit ratio unknown now, {told['hit_ratio']:.4f} since the start" in out
    assert out.splitlines()[-1].split()[:2] == ["slow", "closed"]


PAGE = """
kvtier_primary_hits_total {hits}
kvtier_primary_misses_total {misses}
kvtier_primary_stores_total {stores}
kvtier_primary_evictions_total 0
kvtier_primary_rows{{state="ready"}} 30
kvtier_primary_rows{{state="free"}} 10
kvtier_primary_rows_evictable 25
kvtier_runner_up{{engine="0"}} 1
kvtier_runner_up{{engine="1"}} {up}
kvtier_tier_hits_total{{tier="disk",engine="0"}} {hits}
kvtier_tier_hits_total{{tier="disk",engine="1"}} {hits}
kvtier_tier_bytes_total{{tier="disk",operation="load"}} {loaded}
kvtier_tier_breaker{{tier="disk",state="closed",engine="0"}} 1
kvtier_tier_breaker{{tier="disk",state="open",engine="1"}} {is_open}
kvtier_tier_dropped_total{{tier="disk",reason="budget"}} {dropped}
"""
BEFORE = {"hits": 10, "misses": 10, "stores": 5, "loaded": 0, "is_open": 0, "dropped": 1, "up": 1}
AFTER = {"hits": 20, "misses": 40, "stores": 5, "loaded": 8_192, "is_open": 1, "dropped": 7, "up": 0}


def reading(at_s, **numbers):
    return Reading.parsed(PAGE.format(**numbers).lstrip(), at_s)


def test_rates_are_changes_between_two_readings_summed_over_the_engines_of_an_address():
    found = engine_now("here", reading(10.0, **BEFORE), reading(12.0, **AFTER))
    disk = found.tiers["disk"]
    assert (found.hit_ratio, found.hit_ratio_now) == (round(60 / 100, 4), round(30 / 60, 4))
    rates = {"hits_per_s": 5.0, "misses_per_s": 15.0, "stores_per_s": 0.0, "evictions_per_s": 0.0}
    assert found.primary == {"rows": 40, "evictable_rows": 25, **rates}
    assert (disk["hits_per_s"], disk["loaded_bytes_per_s"], disk["dropped_per_s"]) == (10.0, 4_096.0, 3.0)
    assert (found.breakers, found.runner_up) == ({"disk": "open"}, False)


def test_a_restarted_engine_has_no_negative_rates():
    found = engine_now("here", reading(10.0, **AFTER), reading(12.0, **BEFORE))
    assert (found.primary["hits_per_s"], found.tiers["disk"]["loaded_bytes_per_s"]) == (5.0, 0.0)


def test_a_tier_behind_vllms_own_manager_has_no_hit_ratio():
    page = 'kvtier_tier_stored_total{tier="disk"} 4\nkvtier_tier_used_bytes{tier="disk"} 9\n'
    found = engine_now("here", Reading.parsed(page, 0.0), Reading.parsed(page, 1.0))
    assert (found.hit_ratio, found.hit_ratio_now, found.primary) == (None, None, None)
    disk = found.tiers["disk"]
    assert (disk["used_bytes"], disk["capacity_bytes"], found.breakers["disk"]) == (9, 0, "")


class Html(socketserver.StreamRequestHandler):
    def handle(self):
        self.rfile.readline()
        self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 15\r\n\r\n<html>\xff</html>\n")


def test_an_address_without_kvtiers_metrics_is_refused(capsys):
    registry = CollectorRegistry()
    Counter("strange", "Of another program.", registry=registry)
    with served(registry) as port:
        status, out, err = top(capsys, port, "--once")
    assert (status, out) == (2, "")
    assert err == f"kvtier: {port}: there are metrics, but none of kvtier; the address of an engine accepted\n"
    with socketserver.TCPServer(("127.0.0.1", 0), Html) as server:
        threading.Thread(target=server.handle_request).start()
        port = server.server_address[1]
        assert top(capsys, port, "--once")[2].startswith(f"kvtier: '{port}': no metrics there (")


def test_an_address_where_nobody_answers_ends_with_3(capsys):
    with served(CollectorRegistry()) as port:
        pass
    assert top(capsys, port, "--once") == (3, "", f"kvtier: {port}: Connection refused\n")


def test_a_terminal_shows_an_engine_that_changes_and_goes_away_until_ctrl_c(outside):
    """The breaker half opens while it is watched. The last figures stay, with the reason."""
    registry = CollectorRegistry()
    breaker = Gauge("kvtier_tier_breaker", "State.", ("tier", "state"), registry=registry)
    breaker.labels("disk", "closed").set(1)
    terminal, theirs = pty.openpty()
    shown = b""

    def until(word):
        nonlocal shown
        seen = b""
        while word not in seen:
            seen += os.read(terminal, 4_096)
        shown += seen

    with served(registry) as port:
        command = [*KVTIER, "top", str(port), "--interval", "100ms"]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TERM": "xterm", "COLUMNS": "160"}
        watching = subprocess.Popen(command, stdout=theirs, stderr=theirs, env=environment)
        os.close(theirs)
        until(b"closed")
        breaker.labels("disk", "closed").set(0)
        breaker.labels("disk", "half_open").set(1)
        until(b"half_open")
    try:
        until(b"Connection refused")
        assert watching.poll() is None
        watching.send_signal(signal.SIGINT)
        with suppress(OSError):  # Linux's way to say that the other end was closed.
            while piece := os.read(terminal, 4_096):
                shown += piece
        assert watching.wait() == 130
    finally:
        watching.kill()
        watching.wait()
        os.close(terminal)
    assert b"Traceback" not in shown
