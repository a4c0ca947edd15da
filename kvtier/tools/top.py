"""`kvtier top`: a live engine by the metrics that it serves: hit ratio, rates, tiers, breakers.

Rates are the changes between two readings of the page. Samples of all engines behind one address are added up.
"""

import http.client
import socket
import time
from collections.abc import Callable
from typing import Annotated, NamedTuple
from urllib.error import URLError
from urllib.parse import urlsplit
from urllib.request import ProxyHandler, build_opener

import msgspec
import typer
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from kvtier.errors import BackendUnavailable, ConfigError
from kvtier.settings import parse_duration, shown_bytes
from kvtier.tools.options import JsonOption
from kvtier.tools.outputs import busy, check_outputs, console, plain_table, write_json

DEFAULT_ADDRESS = "http://127.0.0.1:8000/metrics"  # Of `vllm serve`.
PATH = "/metrics"
TIMEOUT_S = 5.0  # A busy engine answers within milliseconds.
PAGE_BYTES_MAX = 64 << 20  # Metrics of a thousand engines.
INTERVAL_S_MIN, INTERVAL_S_MAX = 0.1, 3_600.0
BREAKERS = {"open": "red", "half_open": "yellow", "closed": "green"}  # The worst state first.
ACCEPTED = f"{DEFAULT_ADDRESS}, host:port, a port, or unix:/path/of/a/socket accepted"

Figures = dict[str, float]
Metrics = dict[str, tuple[str, dict[str, str]]]
"""The metric, and its labels, of each figure. A figure whose name ends in `_per_s` is a rate."""


class EngineNow(msgspec.Struct, frozen=True, kw_only=True):
    """The JSON of `kvtier top --once`."""

    address: str
    seconds: float  # Between the two readings.
    hit_ratio: float | None  # Since the start; null before the first look-up, and if only vLLM knows it.
    hit_ratio_now: float | None  # Between the readings.
    runner_up: bool  # True if every engine has a runner.
    primary: Figures | None  # Null if the primary is vLLM's.
    breakers: dict[str, str]  # The worst state of each tier's breakers.
    tiers: dict[str, Figures]


class Reading:
    """The samples of one reading of the page."""

    def __init__(self, page: str, at_s: float) -> None:
        self.at_s = at_s
        samples = (sample for family in text_string_to_metric_families(page) for sample in family.samples)
        self.samples = [sample for sample in samples if sample.name.startswith("kvtier_")]

    def values(self, name: str, **labels: str) -> list[float]:
        return [each.value for each in self.samples if each.name == name and labels.items() <= each.labels.items()]

    def labels(self, label: str) -> list[str]:
        """Return the values of a label, in the page's order."""
        return list(dict.fromkeys(each.labels[label] for each in self.samples if label in each.labels))


class Change(NamedTuple):
    """Two readings."""

    before: Reading
    now: Reading

    @property
    def seconds(self) -> float:
        return max(self.now.at_s - self.before.at_s, 1e-9)

    def present(self, name: str, **labels: str) -> float:
        return sum(self.now.values(name, **labels))

    def added(self, name: str, **labels: str) -> float:
        """Return the increase of a counter; its whole value if the engine was restarted."""
        last, this = sum(self.before.values(name, **labels)), self.present(name, **labels)
        return this - last if this >= last else this

    def figures(self, metrics: Metrics, **labels: str) -> Figures:
        return {
            name: round(self.added(metric, **own, **labels) / self.seconds, 3)
            if name.endswith("_per_s")
            else self.present(metric, **own, **labels)
            for name, (metric, own) in metrics.items()
        }


PRIMARY: Metrics = {
    "rows": ("kvtier_primary_rows", {}),
    "evictable_rows": ("kvtier_primary_rows_evictable", {}),
    "hits_per_s": ("kvtier_primary_hits_total", {}),
    "misses_per_s": ("kvtier_primary_misses_total", {}),
    "stores_per_s": ("kvtier_primary_stores_total", {}),
    "evictions_per_s": ("kvtier_primary_evictions_total", {}),
}
TIER: Metrics = {
    "chunks": ("kvtier_tier_chunks", {}),
    "used_bytes": ("kvtier_tier_used_bytes", {}),
    "capacity_bytes": ("kvtier_tier_capacity_bytes", {}),
    "hits_per_s": ("kvtier_tier_hits_total", {}),
    "loaded_bytes_per_s": ("kvtier_tier_bytes_total", {"operation": "load"}),
    "stored_bytes_per_s": ("kvtier_tier_bytes_total", {"operation": "store"}),
    "dropped_per_s": ("kvtier_tier_dropped_total", {}),
    "failed_per_s": ("kvtier_tier_failed_total", {}),
}


def top(
    address: Annotated[
        str, typer.Argument(metavar="ADDRESS", help="The engine's /metrics: a URL, host:port, a port, unix:/path.")
    ] = DEFAULT_ADDRESS,
    interval: Annotated[str, typer.Option(metavar="TIME", help="Time between two readings: 500ms, 2s.")] = "2s",
    once: Annotated[bool, typer.Option("--once", help="Show the figures of two readings once, and end.")] = False,
    json_path: JsonOption = None,
) -> None:
    """Watch a live engine by its metrics: hit ratio, rates, tiers, breakers. Ctrl-C ends it.

    The engine serves its registry, or is inside vLLM, which serves the metrics.
    """
    interval_s = _interval(interval)
    if json_path is not None and not once:
        raise ConfigError("--json: accepted with --once only: without it there is no end")
    check_outputs(json_path, None)
    if not (once or console().is_terminal):
        raise ConfigError("--once: needed if stdout is no terminal")
    before = _read(address)
    if not once:
        _watch(address, interval_s, before)
    with busy(f"watching {address} for {interval_s:g} s"):
        time.sleep(interval_s)
    found = engine_now(address, Change(before, _read(address)))
    write_json(json_path, found).print(_shown(found))


def _interval(text: str) -> float:
    try:
        interval_s = parse_duration(text)
    except ValueError:
        interval_s = 0.0
    if not INTERVAL_S_MIN <= interval_s <= INTERVAL_S_MAX:
        raise ConfigError(f"--interval {text!r}: expected a time from 100ms to 1h, such as 2s")
    return interval_s


def _watch(address: str, interval_s: float, before: Reading) -> None:
    """Show the engine after every interval, also while it is away. Ends by Ctrl-C."""
    shown: RenderableType = Text(f"reading {address}")
    with Live(shown, console=console(), screen=True, auto_refresh=False) as live:
        while True:
            time.sleep(interval_s)
            try:
                now = _read(address)
                shown, before = _shown(engine_now(address, Change(before, now))), now
                live.update(shown, refresh=True)
            except (BackendUnavailable, ConfigError) as error:
                live.update(Group(shown, Text(f"\n{error}", style="red")), refresh=True)


def _read(address: str) -> Reading:
    """Read the page. Raises `BackendUnavailable` without an answer, and `ConfigError` without kvtier's metrics."""
    try:
        with _answer(address) as answer:
            reading = Reading(answer.read(PAGE_BYTES_MAX).decode(), time.monotonic())
    except (OSError, http.client.HTTPException) as error:
        cause = error.reason if isinstance(error, URLError) else error
        if isinstance(cause, http.client.InvalidURL):
            raise ConfigError(f"{address!r}: {cause}; {ACCEPTED}") from error
        reason = cause.strerror if isinstance(cause, OSError) else None
        raise BackendUnavailable(f"{address}: {reason or error}") from error
    except (ValueError, KeyError, IndexError) as error:  # Of the parser.
        raise ConfigError(f"{address!r}: the page has no metrics; {ACCEPTED}") from error
    if not reading.samples:
        raise ConfigError(f"{address}: there are metrics, but none of kvtier; the address of an engine accepted")
    return reading


def _answer(address: str) -> http.client.HTTPResponse:
    """Ask for the page. Raises `ConfigError` if this is no address."""
    path = address.removeprefix("unix:")
    if path.startswith("/") and path != "/":
        return _answer_over_socket(path)
    text = f"127.0.0.1:{address}" if address.isascii() and address.isdecimal() else address
    try:
        parts = urlsplit(text if "://" in text else f"http://{text}")
        named = "://" in text or parts.port is not None  # A lone word is a typo.
        if not (named and parts.scheme in ("http", "https") and parts.hostname and parts.port != 0):
            raise ConfigError(f"{address!r}: {ACCEPTED}")
    except ValueError as error:
        raise ConfigError(f"{address!r}: {error}; {ACCEPTED}") from error
    page = parts if parts.path.strip("/") else parts._replace(path=PATH)
    answer: http.client.HTTPResponse = build_opener(ProxyHandler({})).open(page.geturl(), timeout=TIMEOUT_S)
    return answer


def _answer_over_socket(path: str) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("localhost")
    connection.sock = socket.socket(socket.AF_UNIX)
    try:
        connection.sock.settimeout(TIMEOUT_S)
        connection.sock.connect(path)
        connection.request("GET", PATH, headers={"Connection": "close"})
        return connection.getresponse()
    except BaseException:
        connection.close()
        raise


def engine_now(address: str, change: Change) -> EngineNow:
    """Compute an engine's figures from two readings of its metrics."""
    knows_hits = bool(change.now.values("kvtier_primary_misses_total"))
    tiers = change.now.labels("tier")
    return EngineNow(
        address=address,
        seconds=round(change.seconds, 3),
        hit_ratio=_hit_ratio(change.present) if knows_hits else None,
        hit_ratio_now=_hit_ratio(change.added) if knows_hits else None,
        runner_up=all(change.now.values("kvtier_runner_up")),
        primary=change.figures(PRIMARY) if knows_hits else None,
        breakers={tier: _breaker(change, tier) for tier in tiers},
        tiers={tier: change.figures(TIER, tier=tier) for tier in tiers},
    )


def _hit_ratio(count: Callable[[str], float]) -> float | None:
    hits = count("kvtier_primary_hits_total") + count("kvtier_tier_hits_total")
    lookups = hits + count("kvtier_primary_misses_total")
    return round(hits / lookups, 4) if lookups else None


def _breaker(change: Change, tier: str) -> str:
    states = (state for state in BREAKERS if change.present("kvtier_tier_breaker", state=state, tier=tier))
    return next(states, "")


def _shown(found: EngineNow) -> RenderableType:
    now, start = ("unknown" if each is None else f"{each:.4f}" for each in (found.hit_ratio_now, found.hit_ratio))
    down = "" if found.runner_up else ", no runner"
    parts: list[RenderableType] = [Text(f"{found.address}: hit ratio {now} now, {start} since the start{down}\n")]
    if found.primary is not None:
        primary = plain_table(*map(_heading, PRIMARY))
        primary.add_row(*(_figure(name, value) for name, value in found.primary.items()))
        parts += [primary, Text()]
    tiers = plain_table("tier", "breaker", *map(_heading, TIER))
    for tier, figures in found.tiers.items():
        breaker = Text(found.breakers[tier], style=BREAKERS.get(found.breakers[tier], ""))
        tiers.add_row(Text(tier), breaker, *(_figure(name, value) for name, value in figures.items()))
    return Group(*parts, tiers)


def _heading(name: str) -> str:
    return ">" + name.replace("_bytes", "").replace("_per_s", "/s").replace("_", " ")


def _figure(name: str, value: float) -> str:
    if name == "capacity_bytes" and not value:  # The tier has none.
        return ""
    if "bytes" in name:
        return shown_bytes(round(value))
    return f"{value:,.1f}" if name.endswith("per_s") else f"{value:,.0f}"
