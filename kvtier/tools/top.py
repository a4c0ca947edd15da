"""`kvtier top`: a live engine by its metrics; rates are changes between two readings, engines of a page are summed."""

import http.client
import time
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
TIMEOUT_S = 5.0  # A busy engine answers within milliseconds.
INTERVAL_S_MIN, INTERVAL_S_MAX = 0.1, 3_600.0
BREAKERS = {"open": "red", "half_open": "yellow", "closed": "green"}  # The worst state first.
ACCEPTED = f"{DEFAULT_ADDRESS}, host:port or a port accepted"

Figures = dict[str, float]
Metrics = dict[str, tuple[str, dict[str, str]]]
"""The metric, and its labels, of each figure. A figure whose name ends in `_per_s` is a rate."""

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

SESSION: Metrics = {f"{what}_per_s": (f"kvtier_keeper_session_{what}_total", {}) for what in ("loaded", "stored")}
SESSION["held"] = ("kvtier_keeper_session_held", {})


class EngineNow(msgspec.Struct, frozen=True, kw_only=True):
    """The JSON of `kvtier top --once`."""

    address: str  # Address of the metrics.
    seconds: float  # Time between the two readings.
    hit_ratio: float | None  # Share found since the start; null without look-ups, or if only vLLM knows it.
    hit_ratio_now: float | None  # The same between the readings.
    runner_up: bool  # Every engine has a runner.
    primary: Figures | None  # Rows, evictable rows and chunks a second; null if the primary is vLLM's.
    breakers: dict[str, str]  # The worst state of each tier's breakers.
    tiers: dict[str, Figures]  # Each tier's chunks, bytes, capacity (0: none), and rates a second.
    sessions: dict[str, Figures]  # Of `kvtier serve`: chunks of each session with a keeper, held and a second.


def top(
    address: Annotated[
        str, typer.Argument(metavar="ADDRESS", help="The engine's /metrics: a URL, host:port or a port.")
    ] = DEFAULT_ADDRESS,
    interval: Annotated[str, typer.Option(metavar="TIME", help="Time between two readings: 500ms, 2s.")] = "2s",
    once: Annotated[bool, typer.Option("--once", help="Show the figures of two readings once, and end.")] = False,
    json_path: JsonOption = None,
) -> None:
    """Watch a live engine by its metrics: hit ratio, rates, tiers, breakers. Ctrl-C ends it.

    The engine serves its registry, or is inside vLLM, which serves the metrics; or `kvtier serve` does.
    """
    try:
        interval_s = parse_duration(interval)
    except ValueError:
        interval_s = 0.0
    if not INTERVAL_S_MIN <= interval_s <= INTERVAL_S_MAX:
        raise ConfigError(f"--interval {interval!r}: expected a time from 100ms to 1h, such as 2s")
    if json_path is not None and not once:
        raise ConfigError("--json: accepted with --once only: without it there is no end")
    check_outputs(json_path)
    if not (once or console().is_terminal):
        raise ConfigError("--once: needed if stdout is no terminal")
    before = Reading.of(address)
    if not once:
        _watch(address, interval_s, before)
    with busy(f"watching {address} for {interval_s:g} s"):
        time.sleep(interval_s)
    found = engine_now(address, before, Reading.of(address))
    write_json(json_path, found).print(_shown(found))


def _watch(address: str, interval_s: float, before: "Reading") -> None:
    """Show the engine after every interval, also while it is away. Ends by Ctrl-C."""
    shown: RenderableType = Text(f"reading {address}")
    with Live(shown, console=console(), screen=True, auto_refresh=False) as live:
        while True:
            time.sleep(interval_s)
            try:
                now = Reading.of(address)
                shown, before = _shown(engine_now(address, before, now)), now
                live.update(shown, refresh=True)
            except (BackendUnavailable, ConfigError) as error:
                live.update(Group(shown, Text(f"\n{error}", style="red")), refresh=True)


class Reading(NamedTuple):
    at_s: float
    samples: list[tuple[str, dict[str, str], float]]

    @classmethod
    def parsed(cls, page: str, at_s: float) -> "Reading":
        families = text_string_to_metric_families(page)
        samples = [(each.name, each.labels, each.value) for family in families for each in family.samples]
        return cls(at_s, [sample for sample in samples if sample[0].startswith("kvtier_")])

    @classmethod
    def of(cls, address: str) -> "Reading":
        """Read the page. `BackendUnavailable` without an answer, `ConfigError` without kvtier's metrics."""
        try:
            text = f"127.0.0.1:{address}" if address.isdecimal() else address
            parts = urlsplit(text if "://" in text else f"http://{text}")
            if not (parts.hostname and (parts.port or "://" in text) and parts.scheme in ("http", "https")):
                raise ConfigError(f"{address!r}: {ACCEPTED}")  # A lone word is a typo, too.
            page = parts if parts.path.strip("/") else parts._replace(path="/metrics")
            with build_opener(ProxyHandler({})).open(page.geturl(), timeout=TIMEOUT_S) as answer:
                reading = cls.parsed(answer.read(64 << 20).decode(), time.monotonic())  # Metrics of a thousand engines.
        except (ValueError, KeyError, IndexError, http.client.InvalidURL) as error:  # Of an address, and of the parser.
            raise ConfigError(f"{address!r}: no metrics there ({error}); {ACCEPTED}") from error
        except (OSError, http.client.HTTPException) as error:
            cause = error.reason if isinstance(error, URLError) else error
            reason = cause.strerror if isinstance(cause, OSError) else None
            raise BackendUnavailable(f"{address}: {reason or error}") from error
        if not reading.samples:
            raise ConfigError(f"{address}: there are metrics, but none of kvtier; the address of an engine accepted")
        return reading

    def values(self, name: str, **labels: str) -> list[float]:
        return [value for each, own, value in self.samples if each == name and labels.items() <= own.items()]


def engine_now(address: str, before: Reading, now: Reading) -> EngineNow:
    seconds = max(now.at_s - before.at_s, 1e-9)

    def present(name: str, **labels: str) -> float:
        return sum(now.values(name, **labels))

    def added(name: str, **labels: str) -> float:  # A counter that fell is that of a restarted engine.
        last, this = sum(before.values(name, **labels)), present(name, **labels)
        return this - last if this >= last else this

    def figure(name: str, metric: str, **labels: str) -> float:
        return round(added(metric, **labels) / seconds, 3) if name.endswith("_per_s") else present(metric, **labels)

    def figures(metrics: Metrics, **labels: str) -> Figures:
        return {name: figure(name, metric, **own, **labels) for name, (metric, own) in metrics.items()}

    knows_hits = bool(now.values("kvtier_primary_misses_total"))
    ratios: list[float | None] = []
    for count in (present, added):
        hits = count("kvtier_primary_hits_total") + count("kvtier_tier_hits_total")
        lookups = hits + count("kvtier_primary_misses_total")
        ratios.append(round(hits / lookups, 4) if knows_hits and lookups else None)
    tiers = list(dict.fromkeys(labels["tier"] for _, labels, _ in now.samples if "tier" in labels))
    states = {tier: [one for one in BREAKERS if present("kvtier_tier_breaker", state=one, tier=tier)] for tier in tiers}
    sessions = {(own["keeper"], own["session"], own["engine"]): own for _, own, _ in now.samples if "session" in own}
    return EngineNow(
        address=address,
        seconds=round(seconds, 3),
        hit_ratio=ratios[0],
        hit_ratio_now=ratios[1],
        runner_up=all(now.values("kvtier_runner_up")),
        primary=figures(PRIMARY) if knows_hits else None,
        breakers={tier: next(iter(states[tier]), "") for tier in tiers},
        tiers={tier: figures(TIER, tier=tier) for tier in tiers},
        sessions={" ".join(names): figures(SESSION, **own) for names, own in sessions.items()},
    )


def _shown(found: EngineNow) -> RenderableType:
    now, start = ("unknown" if each is None else f"{each:.4f}" for each in (found.hit_ratio_now, found.hit_ratio))
    down = "" if found.runner_up else ", no runner"
    parts: list[RenderableType] = [Text(f"{found.address}: hit ratio {now} now, {start} since the start{down}\n")]
    primary, tiers = plain_table(*map(_heading, PRIMARY)), plain_table("tier", "breaker", *map(_heading, TIER))
    if found.primary is not None:
        primary.add_row(*map(_figure, found.primary, found.primary.values()))
        parts += [primary, Text()]
    for tier, figures in found.tiers.items():
        breaker = Text(found.breakers[tier], style=BREAKERS.get(found.breakers[tier], ""))
        tiers.add_row(Text(tier), breaker, *map(_figure, figures, figures.values()))
    sessions = plain_table("keeper, session, engine", *map(_heading, SESSION))
    for name, figures in found.sessions.items():
        sessions.add_row(Text(name), *map(_figure, figures, figures.values()))
    return Group(*parts, sessions if found.sessions else tiers)


def _heading(name: str) -> str:
    return ">" + name.replace("_bytes", "").replace("_per_s", "/s").replace("_", " ")


def _figure(name: str, value: float) -> str:
    if "bytes" in name:
        return "" if name == "capacity_bytes" and not value else shown_bytes(round(value))  # 0: it has none.
    return f"{value:,.1f}" if name.endswith("per_s") else f"{value:,.0f}"
