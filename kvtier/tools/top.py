"""`kvtier top`: a live engine by the metrics that it serves: tiers, rates, hit ratio, how full they are, breakers.

Rates are what has changed between two readings of the page. Nothing is asked of the engine but this page, so that it
need not know of whoever watches.
"""

import http.client
import math
import os
import socket
import time
from collections.abc import Callable, Iterator
from typing import Annotated, NamedTuple
from urllib.parse import urljoin, urlsplit

import msgspec
import typer
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from kvtier.errors import BackendUnavailable, ConfigError
from kvtier.settings import parse_duration, shown_bytes
from kvtier.tools.options import JsonOption
from kvtier.tools.outputs import busy, check_outputs, console, plain_table, write_json

DEFAULT_ADDRESS = "http://127.0.0.1:8000/metrics"  # Where `vllm serve` has it.
PATH = "/metrics"
TIMEOUT_S = 5.0  # An engine that is busy answers within milliseconds.
PAGE_BYTES_MAX = 64 << 20  # A thousand engines' metrics.
REDIRECTS_MAX = 3
REDIRECTED = {301, 302, 307, 308}
INTERVAL_S_MIN, INTERVAL_S_MAX = 0.1, 3_600.0
ROW_STATES = {"ready", "filling", "free", "quarantined"}  # An older engine has reasons to keep rows among them.
STYLES = {"closed": "green", "half_open": "yellow", "open": "red"}
ACCEPTED = f"{DEFAULT_ADDRESS}, host:port, a port, or unix:/path/of/a/socket accepted"

Labels = dict[str, str]


class Address(NamedTuple):
    """The place where an engine's metrics are."""

    url: str  # Of a socket: its path within the server.
    socket_path: str = ""


class TransferTimes(msgspec.Struct, frozen=True):
    """Quantiles of transfers between the two readings, in seconds, as exact as the metric's buckets."""

    p50: float
    p99: float
    transfers: int


class WaitTimes(msgspec.Struct, frozen=True):
    """Quantiles of what requests waited for loads, likewise."""

    p50: float
    p99: float
    waits: int


class PrimaryNow(msgspec.Struct, frozen=True, kw_only=True):
    """The primary. Rates are chunks a second."""

    rows: dict[str, int]  # By state; together they are all rows.
    rows_held: dict[str, int]  # By the reason for which they stay; a row may have several.
    rows_evictable: int | None  # Null where the engine is too old to say.
    row_bytes: int
    used_share: float | None  # Of the rows; null where there are none.
    hits_per_s: float
    misses_per_s: float
    stores_per_s: float
    evictions_per_s: float


class TierNow(msgspec.Struct, frozen=True, kw_only=True):
    """One tier. Rates are a second."""

    name: str
    breaker: str  # `closed`, `open` or `half_open`; empty where nothing says it.
    chunks: int
    used_bytes: int
    capacity_bytes: int | None
    used_share: float | None  # Of the capacity; null without one.
    loading: int
    storing: int
    hits_per_s: float
    loaded_bytes_per_s: float
    stored_bytes_per_s: float
    dropped_per_s: float
    failed_per_s: float
    dropped: dict[str, int]  # Since the start, by reason.
    failed: dict[str, int]
    transfer_s: dict[str, TransferTimes]  # By operation, as far as there were any.


class EngineNow(msgspec.Struct, frozen=True, kw_only=True):
    """The JSON of `kvtier top --once`."""

    address: str
    seconds: float  # Between the two readings.
    hit_ratio: float | None  # Since the start; null before the first look-up, and where vLLM alone knows it.
    hit_ratio_now: float | None  # Between the readings.
    primary: PrimaryNow | None  # Null where it is vLLM's own.
    tiers: list[TierNow]
    wait_s: WaitTimes | None  # Null if no wait ended between the readings.
    runner_up: bool | None  # Whether every engine has a runner; null where one is too old to say.
    runners_lost: int
    versions: list[str]  # Of kvtier.


class Reading:
    """The metrics of one moment. A name's series are added up over all labels that are not asked for."""

    def __init__(self, page: str, at_s: float) -> None:
        self.at_s = at_s
        self._series: dict[str, list[tuple[Labels, float]]] = {}
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                if sample.name.startswith("kvtier_"):
                    self._series.setdefault(sample.name, []).append((sample.labels, sample.value))

    def __bool__(self) -> bool:
        return bool(self._series)

    def has(self, name: str, **labels: str) -> bool:
        return any(True for _ in self._matching(name, labels))

    def sum(self, name: str, **labels: str) -> float:
        return sum(value for _, value in self._matching(name, labels))

    def most(self, name: str) -> float:
        return max((value for _, value in self._matching(name, {})), default=0.0)

    def every(self, name: str) -> bool | None:
        """Say whether no series of this name is 0; None if there is none."""
        return all(value for _, value in self._matching(name, {})) if self.has(name) else None

    def by(self, label: str, name: str, **labels: str) -> dict[str, float]:
        """Return the sums by the values of one more label, in the page's order."""
        sums: dict[str, float] = {}
        for found, value in self._matching(name, labels):
            sums[found[label]] = sums.get(found[label], 0.0) + value
        return sums

    def values(self, label: str) -> list[str]:
        """Return all values of a label, whatever it is a label of."""
        found = (labels[label] for series in self._series.values() for labels, _ in series if label in labels)
        return list(dict.fromkeys(found))

    def _matching(self, name: str, wanted: Labels) -> Iterator[tuple[Labels, float]]:
        for labels, value in self._series.get(name, ()):
            if wanted.items() <= labels.items():
                yield labels, value


def top(
    address: Annotated[
        str, typer.Argument(metavar="ADDRESS", help="The engine's /metrics: a URL, host:port, a port, unix:/path.")
    ] = DEFAULT_ADDRESS,
    interval: Annotated[str, typer.Option(metavar="TIME", help="Time between two readings: 500ms, 2s.")] = "2s",
    once: Annotated[bool, typer.Option("--once", help="Show two readings' figures once, instead of going on.")] = False,
    json_path: JsonOption = None,
) -> None:
    """Watch a live engine by its metrics: tiers, rates, hit ratio, how full each is, breakers. Ctrl-C ends it.

    The engine may be inside vLLM, whose own address serves the metrics, or serve its registry by itself. What has been
    counted by all engines behind one address is added up.
    """
    where, pause_s = _address(address), _interval(interval)
    if json_path is not None and not once:
        raise ConfigError("--json: accepted with --once only: without it there is no end")
    check_outputs(json_path, None)
    screen = console()
    if not (once or screen.is_terminal):
        raise ConfigError("--once: needed where stdout is no terminal: a screen that changes is nothing for a pipe")
    before = _read(where, address)
    if not once:
        _watch(where, address, pause_s, before)
    with busy(f"watching {address} for {pause_s:g} s"):
        time.sleep(pause_s)
    found = engine_now(address, before, _read(where, address))
    write_json(json_path, found).print(_shown(found))


def _watch(where: Address, address: str, pause_s: float, before: Reading) -> None:
    """Show it anew after every pause, also while the engine is away for a moment. Ends by Ctrl-C."""
    screen = console()
    with Live(Text(f"reading {address}"), console=screen, screen=True, auto_refresh=False) as live:
        shown: RenderableType = Text(f"reading {address}")
        while True:
            time.sleep(pause_s)
            try:
                now = _read(where, address)
            except (BackendUnavailable, ConfigError) as error:
                live.update(Group(shown, Text(f"\n{error}", style="red")), refresh=True)
                continue
            shown, before = _shown(engine_now(address, before, now)), now
            live.update(shown, refresh=True)


def _interval(text: str) -> float:
    try:
        interval_s = parse_duration(text)
    except ValueError:
        interval_s = 0.0
    if not INTERVAL_S_MIN <= interval_s <= INTERVAL_S_MAX:
        raise ConfigError(f"--interval {text!r}: expected a time from 100ms to 1h, such as 2s")
    return interval_s


# Reading the page.


def _address(text: str) -> Address:
    if text.startswith(("unix:", "/")):
        path = "/" + text.removeprefix("unix:").lstrip("/")
        if "\0" in path or path == "/":
            raise ConfigError(f"{text!r}: {ACCEPTED}")
        return Address(PATH, path)
    if text.isascii() and text.isdecimal():
        text = f"127.0.0.1:{text}"
    url = text if "://" in text else f"http://{text}"
    try:
        parts = urlsplit(url)
        port = parts.port or 80
    except ValueError as error:
        raise ConfigError(f"{text!r}: {error}; {ACCEPTED}") from error
    named = "://" in text or parts.netloc.rpartition(":")[1]  # A word alone is a mistyped one.
    if parts.scheme not in ("http", "https") or not parts.hostname or not 0 < port < 65_536 or not named:
        raise ConfigError(f"{text!r}: {ACCEPTED}")
    return Address(url if parts.path not in ("", "/") else urljoin(url, PATH))


def _read(where: Address, address: str) -> Reading:
    """Read the page. Raises `BackendUnavailable` if nobody answers, and `ConfigError` if it is no engine that does."""
    page = _page(where, address)
    try:
        reading = Reading(page.decode(), time.monotonic())
    except (ValueError, KeyError, IndexError) as error:
        raise ConfigError(f"{address}: what is there are no metrics; {ACCEPTED}") from error
    if not reading:
        raise ConfigError(f"{address}: there are metrics, but none of kvtier; the address of an engine accepted")
    return reading


def _page(where: Address, address: str) -> bytes:
    for _ in range(REDIRECTS_MAX):
        try:
            answer, page = _answer(where)
        except (http.client.InvalidURL, UnicodeError) as error:
            raise ConfigError(f"{address!r}: {error}; {ACCEPTED}") from error
        except (OSError, http.client.HTTPException) as error:
            raise BackendUnavailable(f"{address}: {_reason(error)}") from error
        if answer.status in REDIRECTED:
            where = where._replace(url=urljoin(where.url, answer.headers.get("Location", "")))
        elif answer.status != http.client.OK:
            raise BackendUnavailable(f"{address}: answers with {answer.status} {answer.reason}")
        elif len(page) > PAGE_BYTES_MAX:
            raise ConfigError(f"{address}: more than {PAGE_BYTES_MAX:,} bytes; {ACCEPTED}")
        else:
            return page
    raise BackendUnavailable(f"{address}: leads elsewhere again and again")


def _answer(where: Address) -> tuple[http.client.HTTPResponse, bytes]:
    connection = _connection(where)
    try:
        connection.request("GET", _path_of(where.url), headers={"Accept": "text/plain", "Host": _host(where)})
        answer = connection.getresponse()
        return answer, answer.read(PAGE_BYTES_MAX + 1)
    finally:
        connection.close()


def _reason(error: Exception) -> str:
    told = error.strerror if isinstance(error, OSError) else None
    return told or str(error) or type(error).__name__


class _SocketConnection(http.client.HTTPConnection):
    """HTTP over a Unix socket, as `vllm serve --uds` serves it."""

    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=TIMEOUT_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(TIMEOUT_S)
        self.sock.connect(os.fsencode(self._path))


def _connection(where: Address) -> http.client.HTTPConnection:
    if where.socket_path:
        return _SocketConnection(where.socket_path)
    parts = urlsplit(where.url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    return kind(parts.hostname or "", parts.port, timeout=TIMEOUT_S)


def _path_of(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.path or PATH}?{parts.query}" if parts.query else parts.path or PATH


def _host(where: Address) -> str:
    return "localhost" if where.socket_path else urlsplit(where.url).netloc.rpartition("@")[2]


# What two readings say.


def engine_now(address: str, before: Reading, now: Reading) -> EngineNow:
    """Say what an engine does, by two readings of its metrics."""
    seconds = max(now.at_s - before.at_s, 1e-9)

    def added(name: str, **labels: str) -> float:
        """Return what was counted between them; all of it if the engine was started anew."""
        last, this = before.sum(name, **labels), now.sum(name, **labels)
        return this - last if this >= last else this

    def per_s(name: str, **labels: str) -> float:
        return round(added(name, **labels) / seconds, 3)

    knows_hits = now.has("kvtier_primary_misses_total")
    return EngineNow(
        address=address,
        seconds=round(seconds, 3),
        hit_ratio=_hit_ratio(now.sum) if knows_hits else None,
        hit_ratio_now=_hit_ratio(added) if knows_hits else None,
        primary=_primary_now(now, per_s) if knows_hits else None,
        tiers=[_tier_now(name, now, added, per_s) for name in now.values("tier")],
        wait_s=_wait_times(now, added),
        runner_up=now.every("kvtier_runner_up"),
        runners_lost=int(now.sum("kvtier_runners_lost_total")),
        versions=list(now.by("version", "kvtier_build_info")),
    )


def _hit_ratio(count: Callable[[str], float]) -> float | None:
    hits = count("kvtier_primary_hits_total") + count("kvtier_tier_hits_total")
    lookups = hits + count("kvtier_primary_misses_total")
    return round(hits / lookups, 4) if lookups else None


def _primary_now(now: Reading, per_s: Callable[[str], float]) -> PrimaryNow:
    by_state = now.by("state", "kvtier_primary_rows")
    rows = {state: int(count) for state, count in by_state.items() if state in ROW_STATES}
    total = sum(rows.values())
    evictable = "kvtier_primary_rows_evictable"
    return PrimaryNow(
        rows=rows,
        rows_held={reason: int(count) for reason, count in now.by("reason", "kvtier_primary_rows_held").items()},
        rows_evictable=int(now.sum(evictable)) if now.has(evictable) else None,
        row_bytes=int(now.most("kvtier_primary_row_bytes")),
        used_share=round(1 - rows.get("free", 0) / total, 4) if total else None,
        hits_per_s=per_s("kvtier_primary_hits_total"),
        misses_per_s=per_s("kvtier_primary_misses_total"),
        stores_per_s=per_s("kvtier_primary_stores_total"),
        evictions_per_s=per_s("kvtier_primary_evictions_total"),
    )


def _tier_now(name: str, now: Reading, added: Callable[..., float], per_s: Callable[..., float]) -> TierNow:
    used_bytes = int(now.sum("kvtier_tier_used_bytes", tier=name))
    capacity = "kvtier_tier_capacity_bytes"
    capacity_bytes = int(now.sum(capacity, tier=name)) if now.has(capacity, tier=name) else None
    operations = now.by("operation", "kvtier_transfer_seconds_count", tier=name)
    times = {operation: _transfer_times(operation, name, now, added) for operation in operations}
    return TierNow(
        name=name,
        breaker=_breaker(now.by("state", "kvtier_tier_breaker", tier=name)),
        chunks=int(now.sum("kvtier_tier_chunks", tier=name)),
        used_bytes=used_bytes,
        capacity_bytes=capacity_bytes,
        used_share=round(used_bytes / capacity_bytes, 4) if capacity_bytes else None,
        loading=int(now.sum("kvtier_tier_loading", tier=name)),
        storing=int(now.sum("kvtier_tier_storing", tier=name)),
        hits_per_s=per_s("kvtier_tier_hits_total", tier=name),
        loaded_bytes_per_s=per_s("kvtier_tier_bytes_total", tier=name, operation="load"),
        stored_bytes_per_s=per_s("kvtier_tier_bytes_total", tier=name, operation="store"),
        dropped_per_s=per_s("kvtier_tier_dropped_total", tier=name),
        failed_per_s=per_s("kvtier_tier_failed_total", tier=name),
        dropped=_counts(now.by("reason", "kvtier_tier_dropped_total", tier=name)),
        failed=_counts(now.by("reason", "kvtier_tier_failed_total", tier=name)),
        transfer_s={operation: found for operation, found in times.items() if found is not None},
    )


def _counts(sums: dict[str, float]) -> dict[str, int]:
    return {reason: int(count) for reason, count in sums.items() if count}


def _breaker(states: dict[str, float]) -> str:
    """Return the worst state that a breaker is in, of all engines behind the address."""
    return next((state for state in ("open", "half_open", "closed") if states.get(state)), "")


def _transfer_times(operation: str, tier: str, now: Reading, added: Callable[..., float]) -> TransferTimes | None:
    times = _times("kvtier_transfer_seconds", now, added, tier=tier, operation=operation)
    return None if times is None else TransferTimes(*times)


def _wait_times(now: Reading, added: Callable[..., float]) -> WaitTimes | None:
    times = _times("kvtier_load_wait_seconds", now, added)
    return None if times is None else WaitTimes(*times)


def _times(name: str, now: Reading, added: Callable[..., float], **labels: str) -> tuple[float, float, int] | None:
    """Return quantiles of what came between the readings, and how many came; None if nothing did."""
    bounds = sorted(now.by("le", f"{name}_bucket", **labels), key=float)
    counts = [added(f"{name}_bucket", **labels, le=bound) for bound in bounds]
    if not counts or not counts[-1]:
        return None
    buckets = list(zip(map(float, bounds), counts, strict=True))
    return _quantile(0.5, buckets), _quantile(0.99, buckets), int(counts[-1])


def _quantile(share: float, buckets: list[tuple[float, float]]) -> float:
    """Return a quantile by the counts up to each bound, evenly spread within a bucket, as Prometheus does."""
    wanted, below_s, below = share * buckets[-1][1], 0.0, 0.0
    for bound_s, count in buckets:
        if count >= wanted and count > below:
            if math.isinf(bound_s):
                break
            return round(below_s + (bound_s - below_s) * (wanted - below) / (count - below), 6)
        below_s, below = (below_s if math.isinf(bound_s) else bound_s), count
    return below_s


# For people.


def _shown(found: EngineNow) -> RenderableType:
    ratios = f"hit ratio {_ratio(found.hit_ratio_now)} now, {_ratio(found.hit_ratio)} since the start"
    waits = "" if found.wait_s is None else f", waits for loads p99 {found.wait_s.p99 * 1_000:,.1f} ms"
    down = ", no runner" if found.runner_up is False else ""
    lost = f", {found.runners_lost:,} runners lost" if found.runners_lost else ""
    parts: list[RenderableType] = [Text(f"{found.address}: {ratios}{waits}{down}{lost}"), Text()]
    if found.primary is not None:
        parts += [_primary_table(found.primary), Text()]
    return Group(*parts, _tier_table(found.tiers))


def _ratio(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.4f}"


def _primary_table(primary: PrimaryNow) -> Table:
    table = plain_table("primary", ">rows", ">full", ">evictable", ">hits/s", ">misses/s", ">stores/s", ">evictions/s")
    rows = sum(primary.rows.values())
    rates = (primary.hits_per_s, primary.misses_per_s, primary.stores_per_s, primary.evictions_per_s)
    size = shown_bytes(rows * primary.row_bytes)
    evictable = "" if primary.rows_evictable is None else f"{primary.rows_evictable:,}"
    table.add_row(size, f"{rows:,}", _percent(primary.used_share), evictable, *(f"{rate:,.1f}" for rate in rates))
    return table


def _tier_table(tiers: list[TierNow]) -> Table:
    table = plain_table(
        "tier",
        "breaker",
        ">chunks",
        ">used",
        ">full",
        ">hits/s",
        ">loaded/s",
        ">stored/s",
        ">load p99",
        ">under way",
        ">dropped/s",
        ">failed/s",
    )
    for tier in tiers:
        loads = tier.transfer_s.get("load")
        table.add_row(
            Text(tier.name),
            Text(tier.breaker, style=STYLES.get(tier.breaker, "")),
            f"{tier.chunks:,}",
            shown_bytes(tier.used_bytes),
            _percent(tier.used_share),
            f"{tier.hits_per_s:,.1f}",
            shown_bytes(round(tier.loaded_bytes_per_s)),
            shown_bytes(round(tier.stored_bytes_per_s)),
            "" if loads is None else f"{loads.p99 * 1_000:,.1f} ms",
            f"{tier.loading + tier.storing:,}",
            f"{tier.dropped_per_s:,.1f}",
            f"{tier.failed_per_s:,.1f}",
        )
    return table


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.1%}"
