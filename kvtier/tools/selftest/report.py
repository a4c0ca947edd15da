"""The report of a self-test: one object for JSON, and the same as Markdown tables for people."""

from collections.abc import Iterable, Sequence
from itertools import groupby

import msgspec

from kvtier.settings import shown_bytes
from kvtier.tools.bench.figures import Machine, Row, shown, shown_chunk

KEPT, BROKEN, SKIPPED = "kept", "broken", "skipped"


class CheckRow(msgspec.Struct, frozen=True, kw_only=True):
    """A promise, for one way to copy, and what was found."""

    part: str
    promise: str
    way: str
    outcome: str  # kept, broken or skipped.
    detail: str
    seconds: float


class FirstToken(msgspec.Struct, frozen=True, kw_only=True):
    """The time to the first token of one prompt, by where the KV of its leading tokens came from."""

    tokens: int
    source: str  # computed, cpu or fs.
    ttft_s: float  # The median of the rounds.
    spread_s: tuple[float, float]
    loaded_bytes: int
    limit_s: float | None  # Its rest computed, and as many bytes at the rate that was measured beside it.
    saved: float | None  # Of the time of a prompt that is computed.
    same_tokens: bool


class Goal(msgspec.Struct, frozen=True, kw_only=True):
    """What a device is to show, and the worst that was found."""

    what: str
    at_least: float
    found: float
    met: bool


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """All that one self-test found."""

    device: dict[str, str]
    dry_run: bool  # On the CPU: its figures say nothing of a device.
    machine: Machine
    seconds: float
    checks: list[CheckRow]
    figures: list[Row]
    model: str
    first_tokens: list[FirstToken]
    goals: list[Goal]

    @property
    def broken(self) -> list[CheckRow]:
        return [check for check in self.checks if check.outcome == BROKEN]


def goals_of(way: str, figures: Sequence[Row], first_tokens: Sequence[FirstToken]) -> list[Goal]:
    """Return what a device is to show and did, by the way to copy that transfers use there."""
    own = [row for row in figures if row.settings.get("way") == way]
    copied = [(int(row.settings["page_bytes"] or 0), row.ratio) for row in own if row.operation in ("store", "load")]
    beside = [row.ratio for row in own if row.operation.startswith("matmul")]
    longest = max((each.tokens for each in first_tokens), default=0)
    saved = [each.saved for each in first_tokens if each.tokens == longest and each.source == "cpu" and each.saved]
    wanted = [
        (
            "pages of 64 KiB and more, of the plain copy's rate",
            0.9,
            [ratio for page, ratio in copied if page >= 1 << 16],
        ),
        ("pages of 16 KiB, of the plain copy's rate", 0.6, [ratio for page, ratio in copied if page == 1 << 14]),
        ("a matmul beside copies, of its rate alone", 0.97, beside),
        (f"a hit from cpu, of the time to the first of {longest:,} tokens", 0.9, saved),
    ]
    return [
        Goal(what=what, at_least=least, found=min(found), met=min(found) >= least)
        for what, least, found in wanted
        if found
    ]


def winners(figures: Iterable[Row]) -> list[tuple[int, str, str, float]]:
    """Return for pages of each size and direction the fastest way, and how much faster it is than the next."""
    rows = [row for row in figures if row.operation in ("store", "load")]
    found = list[tuple[int, str, str, float]]()
    for (page_bytes, operation), group in groupby(sorted(rows, key=_page_and_operation), _page_and_operation):
        best, *others = sorted(group, key=lambda row: -row.figure)
        gain = best.figure / others[0].figure if others else 1.0
        found.append((page_bytes, operation, str(best.settings["way"]), gain))
    return found


def _page_and_operation(row: Row) -> tuple[int, str]:
    return int(row.settings["page_bytes"] or 0), row.operation


def as_markdown(report: Report) -> str:
    """Write a report for people."""
    parts = [_head(report), _checks(report)]
    if report.figures:
        parts.append(_figures(report))
        if len({row.settings["way"] for row in report.figures}) > 1:
            parts.append(_winners(report))
    if report.first_tokens:
        parts.append(_first_tokens(report))
    if report.goals and not report.dry_run:
        parts.append(_goals(report))
    return "\n\n".join(parts) + "\n"


def _head(report: Report) -> str:
    machine = report.machine
    device = ", ".join(f"{name} {value}" for name, value in report.device.items())
    dry = "\n\nThis was a dry run on the CPU: its figures say nothing of a device." if report.dry_run else ""
    return (
        f"# kvtier {machine.kvtier} on {report.device.get('name', report.device['device'])}\n\n{device}. "
        f"{machine.processor}, {machine.processors} processors, {shown_bytes(machine.memory_bytes)} of memory, "
        f"{machine.kernel}, Python {machine.python}; "
        f"load {machine.load_before[0]:.2f} before, {machine.load_after[0]:.2f} after; {report.seconds:.0f} s.{dry}"
    )


def _checks(report: Report) -> str:
    counts = {outcome: sum(check.outcome == outcome for check in report.checks) for outcome in (KEPT, BROKEN, SKIPPED)}
    rows = [[check.promise, check.way, check.outcome, check.detail] for check in report.checks]
    told = ", ".join(f"{count} {outcome}" for outcome, count in counts.items())
    return f"## Promises: {told}\n\n" + _table(["promise", "way to copy", "outcome", "detail"], rows)


def _figures(report: Report) -> str:
    rows = [
        [
            row.operation,
            shown_chunk(int(row.settings["page_bytes"] or 0)),
            str(row.settings["way"]),
            f"{shown(row.figure)} {row.unit}",
            f"{shown(row.limit)} {row.unit}",
            f"{row.ratio:.2f}",
            f"{row.spread[0]:.2f} to {row.spread[1]:.2f}",
        ]
        for row in report.figures
    ]
    rounds = max(row.rounds for row in report.figures)
    head = ["operation", "page", "way to copy", "figure", "limit", "ratio", "spread"]
    return f"## Rates: medians of {rounds} rounds in turn\n\n" + _table(head, rows)


def _winners(report: Report) -> str:
    rows = [
        [shown_chunk(page), operation, way, f"{gain:.2f}"] for page, operation, way, gain in winners(report.figures)
    ]
    return "## Which way to copy wins\n\n" + _table(["page", "operation", "fastest", "times the next"], rows)


def _first_tokens(report: Report) -> str:
    rows = [
        [
            f"{each.tokens:,}",
            each.source,
            f"{each.ttft_s * 1e3:,.1f} ms",
            f"{each.spread_s[0] * 1e3:,.1f} to {each.spread_s[1] * 1e3:,.1f}",
            f"{each.loaded_bytes / 1e6:,.0f} MB",
            "" if each.limit_s is None else f"{each.limit_s * 1e3:,.1f} ms",
            "" if each.saved is None else f"{each.saved:.1%}",
            "equal" if each.same_tokens else "DIFFERENT",
        ]
        for each in report.first_tokens
    ]
    head = ["prompt", "KV from", "first token", "spread", "loaded", "limit", "saved", "tokens"]
    return f"## Time to the first token: {report.model}\n\n" + _table(head, rows)


def _goals(report: Report) -> str:
    rows = [
        [goal.what, f"{goal.at_least:.2f}", f"{goal.found:.2f}", "yes" if goal.met else "no"] for goal in report.goals
    ]
    return "## Goals\n\n" + _table(["what", "at least", "worst found", "met"], rows)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)
