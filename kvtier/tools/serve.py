"""`kvtier serve`: the keepers of a host's shared tiers as a service, with a watchdog and metrics."""

import logging
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Annotated, Any

import typer
from prometheus_client import CollectorRegistry, Metric, start_http_server
from prometheus_client.registry import Collector

from kvtier.backend import backend_class
from kvtier.errors import ConfigError
from kvtier.tools.configuration import read, tiers

PAUSES_S = (0.0, 0.1, 0.5, 1.0, 5.0)  # Before each start in a row; a keeper that ran for longer begins a new one.
END_S = 15.0  # A keeper that is stopped ends when it goes on.
PREFIX, HELP = "kvtier_keeper_", "Described on the page Metrics."
SIGNALS = (signal.SIGINT, signal.SIGTERM)  # Blocked in keepers, too: they end with this process, however it ends.


def serve(
    path: Annotated[str, typer.Argument(metavar="CONFIG", help="TOML, JSON, or vLLM's --kv-transfer-config.")],
    host: Annotated[str, typer.Option(help="Address of /metrics.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65_535, help="Port of /metrics; 0: any free one.")] = 9401,
) -> None:
    """Run the keepers of all tiers that engines share, until SIGTERM or Ctrl-C. Those that end are started again."""
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    life, held = os.pipe()
    found = [(getattr(backend_class(kind), "keeper", None), options) for _, kind, options in tiers(read(path))]
    keepers = [Keeper(place, options, life) for of, options in found if of is not None and (place := of(options))]
    if not keepers:
        raise ConfigError(f"{path}: no tier with a keeper given, memory or segments of fs with shared = true accepted")
    registry = CollectorRegistry()
    registry.register(Keepers(keepers))
    typer.echo(f"metrics: http://{host}:{start_http_server(port, host, registry)[0].server_port}/metrics")
    for keeper in keepers:
        keeper.start()
    if address := os.environ.get("NOTIFY_SOCKET"):  # Of systemd.
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify:
            notify.sendto(b"READY=1", "\0" + address[1:] if address[0] == "@" else address)
    signal.sigwait(SIGNALS)
    os.close(held)
    for keeper in keepers:
        keeper.join(END_S)


class Keeper(threading.Thread):
    """A keeper that is started again whenever it ends. Its socket listens meanwhile, from the construction on."""

    def __init__(self, place: Any, options: Any, life: int) -> None:
        super().__init__(daemon=True)
        self.place, self._options, self._life = place, options, life
        self.listener = place.claim()

    def run(self) -> None:
        row, last = -1, len(PAUSES_S) - 1
        while True:
            began = time.monotonic()
            try:
                self.listener = self.listener or self.place.claim()
                status = self.listener and self.place.run(self.listener, self._options, self._life)
                what = "engines have started a keeper; this service's follows when that has ended"
                what = what if status is None else f"the keeper has ended with status {status}; it is started again"
                self.listener = self.listener if status else None  # A keeper that ends well removes its socket.
            except OSError as error:
                what = f"the keeper does not start: {error.strerror}"
            row = 0 if time.monotonic() - began > PAUSES_S[-1] else min(row + 1, last)
            if select.select([self._life], [], [], PAUSES_S[row])[0]:
                return
            if row < last:
                logging.getLogger(__name__).warning("%s: %s", self.place, what)


class Keepers(Collector):
    """The metrics of keepers, asked at each scrape. One that engines have started is not asked: it would linger on."""

    def __init__(self, keepers: Sequence[Keeper]) -> None:
        self._keepers = keepers

    def collect(self) -> Iterable[Metric]:
        families = dict[str, Metric]()
        for keeper in self._keepers:
            samples: list[tuple[str, dict[str, str], float]] = keeper.place.report() if keeper.listener else []
            for name, labels, value in [("up", dict[str, str](), float(bool(samples))), *samples]:
                kind = "counter" if name.endswith("_total") else "gauge"
                family = families.setdefault(name, Metric(f"{PREFIX}{name.removesuffix('_total')}", HELP, kind))
                family.add_sample(PREFIX + name, {"keeper": str(keeper.place), **labels}, value)
        return families.values()
