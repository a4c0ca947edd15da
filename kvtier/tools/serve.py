"""`kvtier serve`: the keepers of a host's shared tiers as a service, with a watchdog and metrics."""

import os
import select
import signal
import socket
import threading
import time
from collections.abc import Iterable, Mapping
from typing import Annotated, Any

import typer
from prometheus_client import CollectorRegistry, Metric, start_http_server
from prometheus_client.registry import Collector

from kvtier.backend import backend_class
from kvtier.errors import ConfigError, one_line
from kvtier.tools.configuration import read, tiers

PAUSES_S = (0.0, 0.1, 0.5, 1.0, 5.0)  # Before each start in a row; a keeper that ran for longer begins a new one.
SIGNALS = (signal.SIGINT, signal.SIGTERM)  # Blocked in keepers, too: they end with this process, however it ends.


def serve(
    path: Annotated[str, typer.Argument(metavar="CONFIG", help="TOML, JSON, or vLLM's --kv-transfer-config.")],
    host: Annotated[str, typer.Option(help="Address of /metrics.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65_535, help="Port of /metrics; 0: any free one.")] = 9401,
) -> None:
    """Run the keepers of all tiers that engines share, until SIGTERM or Ctrl-C. Those that end are started again."""
    found = [(getattr(backend_class(kind), "keeper", None), options) for _, kind, options in tiers(read(path))]
    keepers = Keepers({place: options for of, options in found if of is not None and (place := of(options))})
    if not keepers.options:
        raise ConfigError(f"{path}: no tier with a keeper given, memory or segments of fs with shared = true accepted")
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    life, held = os.pipe()
    registry = CollectorRegistry()
    registry.register(keepers)
    typer.echo(f"metrics: http://{host}:{start_http_server(port, host, registry)[0].server_port}/metrics")
    threads = [threading.Thread(target=keepers.keep, args=(place, life), daemon=True) for place in keepers.options]
    for thread in threads:
        thread.start()
    if address := os.environ.get("NOTIFY_SOCKET"):  # Of systemd.
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify:
            notify.sendto(b"READY=1", "\0" + address[1:] if address[0] == "@" else address)
    signal.sigwait(SIGNALS)
    os.close(held)
    for thread in threads:
        thread.join(15.0)  # A keeper that is stopped ends when it goes on.


class Keepers(Collector):
    """Keepers by their places. Their sockets listen from the construction on, also while they are started again."""

    def __init__(self, options: Mapping[Any, Any]) -> None:
        self.options, self._listeners = options, {place: place.claim() for place in options}

    def keep(self, place: Any, life: int) -> None:
        """Run a keeper whenever it does not run, until the other end of the pipe `life` is closed."""
        row, last = -1, len(PAUSES_S) - 1
        while True:
            began = time.monotonic()
            try:
                listener = self._listeners[place] = self._listeners[place] or place.claim()
                what = "engines have started a keeper; this service's follows when that has ended"
                if listener is not None:
                    status = place.run(listener, self.options[place], life)
                    what = f"the keeper has ended with status {status}; it is started again"
                    self._listeners[place] = listener if status else None  # One that ends well removes its socket.
            except OSError as error:
                what = f"the keeper does not start: {error.strerror}"
            row = 0 if time.monotonic() - began > PAUSES_S[-1] else min(row + 1, last)
            if select.select([life], [], [], PAUSES_S[row])[0]:
                return
            if row < last:
                typer.echo(one_line(f"kvtier: {place}: {what}"), err=True)

    def collect(self) -> Iterable[Metric]:
        """Ask keepers, except those that engines have started: they would linger on."""
        families = dict[str, Metric]()
        for place, listener in self._listeners.items():
            samples: list[tuple[str, dict[str, str], float]] = place.report() if listener else []
            for name, labels, value in [("up", dict[str, str](), float(bool(samples))), *samples]:
                kind, about = "counter" if name.endswith("_total") else "gauge", "Described on the page Metrics."
                family = families.setdefault(name, Metric(f"kvtier_keeper_{name.removesuffix('_total')}", about, kind))
                family.add_sample(f"kvtier_keeper_{name}", {"keeper": str(place), **labels}, value)
        return families.values()
