"""The page of replays: hits by tier over time, how long things took, what was lost, against what, under which model."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.filesize import decimal

from kvtier.tools.outputs import counted
from kvtier.tools.pictures import draw_distributions, draw_hit_ratios, draw_hits, draw_traffic, one_panel
from kvtier.tools.replay.replay import GPU_NAME
from kvtier.tools.replay.report import Distribution, Report, TierReport, figure_words
from kvtier.tools.replay.virtual import WITH_TIERING, WITHOUT_TIERING
from kvtier.tools.report.page import (
    Page,
    Picture,
    Section,
    Table,
    change,
    headings,
    picture,
    side_by_side,
)

OPERATIONS_MAX = 12  # With a picture of their own in a comparison. The table has all.
LOSSES_ARE = (
    "Dropped chunks were never sent to their tier. Failed ones were sent or asked for, and did not move. "
    "Skipped ones were not to be sent, or not any more."
)

Runs = Mapping[str, Report]

QUANTILES: dict[str, Callable[[Distribution], float]] = {"p50": lambda taken: taken.p50, "p99": lambda taken: taken.p99}


def replay_page(runs: Runs) -> Page:
    """Return the page of one replay, or of several beside each other, by their names; the first is the measure."""
    first = next(iter(runs.values()))
    title = f"kvtier replay: {first.trace}" if len(runs) == 1 else f"kvtier replay: {len(runs)} runs"
    virtual = "in virtual time" if first.ttft_s is not None else "with real bytes"
    subtitle = (
        f"{counted(first.requests, 'request')}, {virtual}; written by kvtier {first.kvtier}"
        if len(runs) == 1
        else "Changes in brackets are against the first run. Marked rows are not the same in all runs."
    )
    sections = (_glance, _hits, _traffic, _times, _losses, _configuration, _model)
    return Page(title, subtitle, [section(runs) for section in sections])


def _glance(runs: Runs) -> Section:
    first = next(iter(runs.values()))
    told = {name: _facts(run, first) for name, run in runs.items()}
    return Section("At a glance", warnings=list(_warnings(runs)), tables=[side_by_side(told)])


def _facts(run: Report, first: Report) -> dict[str, str]:
    return {
        "trace": run.trace,
        "requests": f"{run.requests:,}",
        "chunk references": f"{run.chunk_references:,}",
        "hit ratio": f"{run.hit_ratio:.4f}{change(run.hit_ratio, first.hit_ratio)}",
        "best possible hit ratio": f"{run.best_hit_ratio:.4f}",
        **dict(_first_token_facts(run, first)),
        "wrong chunks": f"{run.wrong_chunks:,}",
        "dropped chunks": f"{run.dropped:,}",
        "failed chunks": f"{run.failed:,}",
        "time that it took": f"{run.seconds:,.1f} s{change(run.seconds, first.seconds)}",
        "requests a second": f"{run.requests_per_s:,.1f}{change(run.requests_per_s, first.requests_per_s)}",
        "kvtier": run.kvtier,
    }


def _first_token_facts(run: Report, first: Report) -> Iterator[tuple[str, str]]:
    """Tell the times to first token, with what they were without tiering behind them."""
    sides = run.ttft_s or {}
    measure = (first.ttft_s or {}).get(WITH_TIERING)
    if WITH_TIERING in sides:
        for name, quantile in QUANTILES.items():
            taken = quantile(sides[WITH_TIERING])
            yield (
                f"time to first token, {name}",
                _ms(taken) + ("" if measure is None else change(taken, quantile(measure))),
            )
            if WITHOUT_TIERING in sides:
                yield f"without tiering, {name}", _ms(quantile(sides[WITHOUT_TIERING]))


def _warnings(runs: Runs) -> Iterator[str]:
    for name, run in runs.items():
        about = f"{name}: " if name else ""
        if run.wrong_chunks:
            yield f"{about}{counted(run.wrong_chunks, 'chunk')} came back with other bytes than were stored."
        if run.interrupted:
            yield f"{about}The replay was interrupted. Its figures are those of the requests that had ended."
        elif not run.drained:
            yield f"{about}Some of what was stored had not reached its tiers when the time for it was over."
        yield from (f"{about}{warning}" for warning in run.warnings)
    if len({(run.trace, run.requests) for run in runs.values()}) > 1:
        yield "The runs did not replay the same requests: their figures differ for that reason, too."


def _hits(runs: Runs) -> Section:
    pictures = [
        picture(_of(name, "Whose hits they were over time."), _panel(draw_hits, run, _tiers(runs)))
        for name, run in runs.items()
    ]
    if len(runs) > 1:
        together = one_panel(lambda axes: draw_hit_ratios(axes, runs))
        pictures.insert(0, picture("Hit ratio so far, of all tiers together.", together))

    told = {
        name: {
            tier: f"{found.hits:,} ({found.hits / run.chunk_references if run.chunk_references else 0:.4f})"
            for tier, found in run.tiers.items()
        }
        for name, run in runs.items()
    }
    return Section(
        "Hits by tier",
        words=[
            "A hit counts for the tier in which its chunk lay when it was looked up. "
            "Only leading runs of a prompt count. "
            f"The share of all chunk references stands in brackets.{_about_gpu(runs)}"
        ],
        pictures=pictures,
        tables=[side_by_side(told)],
    )


def _panel(draw: Callable[[Axes, Report, Sequence[str]], None], run: Report, tiers: Sequence[str]) -> Figure:
    return one_panel(lambda axes: draw(axes, run, tiers))


def _about_gpu(runs: Runs) -> str:
    known = any(GPU_NAME in run.tiers for run in runs.values())
    return f" The tier {GPU_NAME} is the LLM engine's own prefix cache, which kvtier is not asked for." if known else ""


def _traffic(runs: Runs) -> Section:
    pictures = [
        picture(_of(name, "Bytes read and written over time."), _panel(draw_traffic, run, _tiers(runs)))
        for name, run in runs.items()
    ]
    told = {
        name: {
            f"{tier}, {way}": decimal(moved)
            for tier, found in run.tiers.items()
            for way, moved in (("read", found.bytes_loaded), ("written", found.bytes_stored))
        }
        for name, run in runs.items()
    }
    return Section("Bytes moved", pictures=pictures, tables=[side_by_side(told)])


def _times(runs: Runs) -> Section:
    return Section(
        "How long things took",
        words=[
            "Each line shows which share of the calls took no longer than so many milliseconds. "
            "A fetch is a request's wait for its chunks. Loads, stores and probes of a tier are timed by batch."
        ],
        pictures=list(_time_pictures(runs)),
        tables=[_time_table(runs)],
    )


def _time_pictures(runs: Runs) -> Iterator[Picture]:
    if any(run.ttft_s for run in runs.values()):
        yield _time_picture("Time to first token.", _first_tokens(runs))
    if len(runs) == 1:
        (run,) = runs.values()
        yield _time_picture("Calls of the engine and of its tiers.", run.latency_s)
        return
    for operation in _names(runs, lambda run: run.latency_s)[:OPERATIONS_MAX]:
        yield _time_picture(f"{operation}.", {name: run.latency_s.get(operation) for name, run in runs.items()})


def _first_tokens(runs: Runs) -> dict[str, Distribution | None]:
    """Return the lines of a picture: of one run both sides, of several the time with tiering of each."""
    if len(runs) == 1:
        (run,) = runs.values()
        return {side.replace("_", " "): taken for side, taken in (run.ttft_s or {}).items()}
    return {name: (run.ttft_s or {}).get(WITH_TIERING) for name, run in runs.items()}


def _time_picture(caption: str, taken: Mapping[str, Distribution | None]) -> Picture:
    return picture(caption, one_panel(lambda axes: draw_distributions(axes, taken)))


def _time_table(runs: Runs) -> Table:
    if len(runs) == 1:
        (run,) = runs.values()
        rows = [
            [name, _ms(taken.p50), _ms(taken.p99), _ms(taken.mean), f"{taken.samples:,}"]
            for name, taken in _timed(run).items()
        ]
        return Table(["", "p50", "p99", "mean", "calls"], rows)
    return side_by_side(
        {
            name: {
                f"{operation}, {quantile}": _ms(of(taken))
                for operation, taken in _timed(run).items()
                for quantile, of in QUANTILES.items()
            }
            for name, run in runs.items()
        }
    )


def _timed(run: Report) -> dict[str, Distribution]:
    """Return all that was timed, by name."""
    first_tokens = {f"first token, {side.replace('_', ' ')}": taken for side, taken in (run.ttft_s or {}).items()}
    return {**first_tokens, **run.latency_s}


def _losses(runs: Runs) -> Section:
    reasons = dict.fromkeys(
        (name, loss, reason)
        for run in runs.values()
        for name, tier in run.tiers.items()
        for loss, counts in _lost(tier).items()
        for reason in counts
    )
    rows = [
        [
            name,
            loss,
            reason,
            *(f"{_lost(run.tiers[name])[loss].get(reason, 0):,}" if name in run.tiers else "" for run in runs.values()),
        ]
        for name, loss, reason in reasons
    ]
    title = "Dropped and failed, by reason"
    if not rows:
        return Section(title, words=["No chunk was dropped, none was skipped, and none failed."])
    return Section(title, words=[LOSSES_ARE], tables=[Table(["tier", "chunks", "reason", *headings(runs)], rows)])


def _lost(tier: TierReport) -> dict[str, Mapping[str, int]]:
    return {"dropped": tier.dropped, "failed": tier.failed, "skipped": tier.skipped}


def _configuration(runs: Runs) -> Section:
    return Section(
        "Configuration",
        words=["Limits and options of tiers are told where they differ from their defaults. Texts are left out."],
        tables=[side_by_side({name: _flat(run.engine) for name, run in runs.items()}, wordy=True)],
    )


def _flat(given: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Return a nested mapping as one, with paths for names."""
    found: dict[str, str] = {}
    for name, value in given.items():
        path = f"{prefix}{name}"
        if isinstance(value, dict):
            found |= _flat(cast("Mapping[str, Any]", value), f"{path}: ")
        else:
            found[path] = _shown(name, value)
    return found


def _shown(name: str, value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int) and "bytes" in name:
        return f"{value:,} ({decimal(value)})"
    return f"{value:,}" if isinstance(value, int | float) else str(value)


def _model(runs: Runs) -> Section:
    title = "The model and its assumptions"
    if not any(run.model for run in runs.values()):
        return Section(title, words=["Nothing was modelled: real bytes went through real tiers."])
    words = ["In virtual time everything around the engine is a model. A study is worth what its model is."]
    if len(runs) == 1:
        (run,) = runs.values()
        rows = [
            [part.what, "\n".join(" ".join(figure_words(*each)) for each in part.figures.items()), part.source]
            for part in run.model or ()
        ]
        return Section(title, words, tables=[Table(["modelled", "with", "from"], rows, wordy=True)])
    return Section(
        title, words, tables=[side_by_side({name: _modelled(run) for name, run in runs.items()}, wordy=True)]
    )


def _modelled(run: Report) -> dict[str, str]:
    found: dict[str, str] = {}
    for part in run.model or ():
        for name, value in part.figures.items():
            words, shown = figure_words(name, value)
            found[f"{part.what}: {words}"] = f"{shown}\n{part.source}"
    return found


def _of(name: str, words: str) -> str:
    return f"{name}: {words}" if name else words


def _tiers(runs: Runs) -> list[str]:
    return _names(runs, lambda run: run.tiers)


def _names(runs: Runs, named: Callable[[Report], Mapping[str, object]]) -> list[str]:
    return list(dict.fromkeys(name for run in runs.values() for name in named(run)))


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.4g} ms" if seconds < 1 else f"{1e3 * seconds:,.0f} ms"
