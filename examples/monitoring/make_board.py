"""Make the Grafana board: four questions, a row of panels each. `python examples/monitoring/make_board.py` writes it.

The board is made with Grafana's own SDK (`grafana-foundation-sdk`), so that it has what Grafana 11.6 expects. Panels
are data: a title, a description, a unit and queries. How to use the board is told in docs/how-to/monitor.md.
"""

import json
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from grafana_foundation_sdk.builders import common, dashboard, prometheus, stat, statetimeline, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common as looks
from grafana_foundation_sdk.models import dashboard as parts

BOARD = Path(__file__).with_name("board.json")
PAGE = "https://github.com/kvtier/kvtier/blob/main/docs/how-to/monitor.md"
CHOSEN = 'job=~"$job",instance=~"$instance"'
OF_TIER = f'{CHOSEN},tier=~"$tier"'
PANELS_A_ROW, COLUMNS, HEIGHT, STAT_HEIGHT = 3, 24, 8, 4
DATASOURCE = parts.DataSourceRef(type_val="prometheus", uid="${datasource}")

TOKENS_A_SECOND, SECONDS_A_SECOND = "suffix: tokens/s", "suffix: s/s"  # Units that Grafana has no name for.
LINES, STACK, NUMBER, NAMES, STATES = "lines", "stack", "number", "names", "states"
BREAKER = {"0": ("closed", "green"), "1": ("half open", "yellow"), "2": ("open", "red")}
RUNNER = {"0": ("none", "red"), "1": ("up", "green")}


class Query(NamedTuple):
    """A query, and what its series are called."""

    expr: str
    legend: str


class Panel(NamedTuple):
    """A panel, as one of five kinds."""

    title: str
    description: str
    unit: str
    queries: tuple[Query, ...]
    kind: str = LINES
    words: Mapping[str, tuple[str, str]] = MappingProxyType({})  # Of states: each value's word and colour.


def chosen(name: str, *matchers: str) -> str:
    """Select the series of a metric that the board's variables choose."""
    of = OF_TIER if name.startswith(("kvtier_tier_", "kvtier_transfer_")) else CHOSEN
    return f"{name}{{{','.join((of, *matchers))}}}"


def state(name: str, value: str) -> str:
    return chosen(name, f'state="{value}"')


def rate(name: str, *matchers: str) -> str:
    return f"rate({chosen(name, *matchers)}[$__rate_interval])"


def each(expr: str, *labels: str) -> str:
    """Add up by instance and these labels: an instance may be several engines of one vLLM."""
    return f"sum by ({', '.join(('instance', *labels))}) ({expr})"


def row_bytes() -> str:
    return f"on (instance) group_left () max by (instance) ({chosen('kvtier_primary_row_bytes')})"


def quantile(share: float, name: str, *matchers: str, by: tuple[str, ...] = ()) -> str:
    return f"histogram_quantile({share}, {each(rate(f'{name}_bucket', *matchers), 'le', *by)})"


def in_range(expr: str) -> str:
    """Count over all that is shown, and not for each moment."""
    return expr.replace("rate(", "increase(").replace("$__rate_interval", "$__range")


# A chunk is loaded from where it lies in the primary, or from a tier. Only tiers' series have the label `tier`.
HITS = each(f"{rate('kvtier_primary_hits_total')} or rate(kvtier_tier_hits_total{{{CHOSEN}}}[$__rate_interval])")
MISSES = each(rate("kvtier_primary_misses_total"))
COMPUTED = f"({each(rate('kvtier_primary_stores_total'))} + {each(rate('kvtier_primary_stores_refused_total'))})"
SAVED = each(rate("kvtier_computing_saved_seconds_total"))
WAITED = each(rate("kvtier_load_wait_seconds_sum"))
HIT_RATIO = f"{HITS} / ({HITS} + {MISSES})"
DECLINED = each(rate("kvtier_tier_declined_total"), "tier")

WORTH = (
    Panel(
        "Hit ratio, over the range",
        "Of all chunks that requests looked up, the share that was loaded instead of computed. A request looks no "
        "further than to its first miss: it counts one miss, however much of it is computed.",
        "percentunit",
        (Query(in_range(HIT_RATIO), "{{instance}}"),),
        NUMBER,
    ),
    Panel(
        "Seconds saved, over the range",
        "What computing the loaded chunks would have taken, less what requests waited for the loads. It stands still "
        "while the prefill speed is not known: see kvtier_prefill_tokens_per_second.",
        "s",
        (Query(in_range(f"{SAVED} - {WAITED}"), "{{instance}}"),),
        NUMBER,
    ),
    Panel(
        "Bytes loaded instead of computed, over the range",
        "Bytes of all chunks that were loaded, wherever they lay.",
        "bytes",
        (Query(in_range(f"{HITS} * {row_bytes()}"), "{{instance}}"),),
        NUMBER,
    ),
    Panel(
        "Hit ratio",
        "The share of looked-up chunks that was loaded instead of computed. Where the ratio falls and the load is the "
        "same, chunks leave too early: see the row on capacity.",
        "percentunit",
        (Query(HIT_RATIO, "{{instance}}"),),
    ),
    Panel(
        "Bytes loaded against bytes computed",
        "Bytes a second of chunks that were loaded, from the primary or from tiers, beside bytes of chunks that the "
        "LLM engine computed and offered. It computes what is not found of prompts, and answers.",
        "binBps",
        (
            Query(f"{each(rate('kvtier_primary_hits_total'))} * {row_bytes()}", "{{instance}} from the primary"),
            Query(f"{each(rate('kvtier_tier_hits_total'), 'tier')} * {row_bytes()}", "{{instance}} from {{tier}}"),
            Query(f"{COMPUTED} * {row_bytes()}", "{{instance}} computed"),
        ),
    ),
    Panel(
        "Seconds saved, each second",
        "Seconds of computing that loads made unnecessary, and seconds that requests waited for these loads, in each "
        "second. Tiering pays while the first line is above the second. Many requests at once give more than one.",
        SECONDS_A_SECOND,
        (Query(SAVED, "{{instance}} computing saved"), Query(WAITED, "{{instance}} waited")),
    ),
)
WELL = (
    Panel(
        "Breakers",
        "The circuit breaker of each tier; of several engines the worst. An open one has the tier left alone after "
        "failures in a row; half open, the tier is tried with a few chunks.",
        "none",
        (
            Query(
                "max by (instance, tier) "  # The worst, where an instance is several engines.
                f"(2 * {state('kvtier_tier_breaker', 'open')} or {state('kvtier_tier_breaker', 'half_open')})",
                "{{instance}} {{tier}}",
            ),
        ),
        STATES,
        BREAKER,
    ),
    Panel(
        "Runners",
        "Whether there is a runner that takes work. Without one nothing is loaded from tiers and nothing is stored. "
        "Another takes a lost runner's place within seconds.",
        "none",
        (Query(f"min by (instance) ({chosen('kvtier_runner_up')})", "{{instance}}"),),
        STATES,
        RUNNER,
    ),
    Panel(
        "Runners lost",
        "Runners that ended too early, in an hour. Each lost one costs the loads and stores that were under way.",
        "short",
        (Query(each(f"increase({chosen('kvtier_runners_lost_total')}[1h])"), "{{instance}}"),),
    ),
    Panel(
        "Chunks dropped",
        "Chunks that were never sent to a tier, by the reason. A dropped chunk is not in that tier later; nothing else "
        "is lost. The reference of metrics explains each reason.",
        "cps",
        (Query(each(rate("kvtier_tier_dropped_total"), "tier", "reason"), "{{instance}} {{tier}} {{reason}}"),),
    ),
    Panel(
        "Chunks failed",
        "Chunks that did not move to or from a tier, by the reason. A chunk that another machine removed counts as "
        "missing, and is no fault.",
        "cps",
        (Query(each(rate("kvtier_tier_failed_total"), "tier", "reason"), "{{instance}} {{tier}} {{reason}}"),),
    ),
    Panel(
        "Calls failed, by cause",
        "Calls of a tier of which something failed, by what lay behind it: the name of an errno, a deadline, a lost "
        "runner, a corrupt chunk, or the tier's own limit.",
        "cps",
        (Query(each(rate("kvtier_tier_causes_total"), "tier", "cause"), "{{instance}} {{tier}} {{cause}}"),),
    ),
    Panel(
        "What tiers report of themselves",
        "Counts that a tier keeps itself: corrupt and refused chunks, lost connections, evictions, and others. Each "
        "tier's page explains its own.",
        "cps",
        (Query(each(rate("kvtier_tier_reported_total"), "tier", "what"), "{{instance}} {{tier}} {{what}}"),),
    ),
    Panel(
        "What runs",
        "Versions of kvtier, of Python and, where kvtier runs inside vLLM, of vLLM.",
        "none",
        (
            Query(
                f"max by (instance, version, python, vllm) ({chosen('kvtier_build_info')})",
                "{{instance}}: kvtier {{version}}, Python {{python}} {{vllm}}",
            ),
        ),
        NAMES,
    ),
)
FULL = (
    Panel(
        "Rows of the primary, by state",
        "Each row is in one state. Ready rows hold chunks; a primary that is full of them is as it should be. "
        "Quarantined rows are lent to transfers that hang, and are lost until these end.",
        "short",
        (Query(each(chosen("kvtier_primary_rows"), "state"), "{{instance}} {{state}}"),),
        STACK,
    ),
    Panel(
        "Rows that can make room",
        "Rows that can be evicted at once, beside those that stay for a reason: a waiting request (leased), a store "
        "into a tier (cascading), a reader (kept) or a hint (retained). With no row left stores are refused.",
        "short",
        (
            Query(each(chosen("kvtier_primary_rows_evictable")), "{{instance}} evictable"),
            Query(each(chosen("kvtier_primary_rows_held"), "reason"), "{{instance}} {{reason}}"),
        ),
    ),
    Panel(
        "Bytes of the primary",
        "Host memory that holds chunks, and all of the primary's memory.",
        "bytes",
        (
            Query(each(chosen("kvtier_primary_used_bytes")), "{{instance}} used"),
            Query(each(chosen("kvtier_primary_capacity_bytes")), "{{instance}} capacity"),
        ),
    ),
    Panel(
        "Tiers: share of the capacity",
        "How full each tier with a limit is. A tier that evicts stays just below one.",
        "percentunit",
        (
            Query(
                f"{each(chosen('kvtier_tier_used_bytes'), 'tier')} / "
                f"{each(chosen('kvtier_tier_capacity_bytes'), 'tier')}",
                "{{instance}} {{tier}}",
            ),
        ),
    ),
    Panel(
        "Tiers: bytes",
        "Bytes that each tier holds, has promised to stores under way, and may hold.",
        "bytes",
        (
            Query(each(chosen("kvtier_tier_used_bytes"), "tier"), "{{instance}} {{tier}} used"),
            Query(each(chosen("kvtier_tier_reserved_bytes"), "tier"), "{{instance}} {{tier}} promised"),
            Query(each(chosen("kvtier_tier_capacity_bytes"), "tier"), "{{instance}} {{tier}} capacity"),
        ),
    ),
    Panel(
        "Evictions",
        "Chunks that left the primary for others, and chunks that fs tiers evicted. Evictions are normal in a full "
        "tier. Chunks that leave before they are used again make the hit ratio fall.",
        "cps",
        (
            Query(each(rate("kvtier_primary_evictions_total")), "{{instance}} primary"),
            Query(each(rate("kvtier_tier_reported_total", 'what="evicted"'), "tier"), "{{instance}} {{tier}}"),
        ),
    ),
    Panel(
        "Refused for lack of room",
        "Chunks that found no room. Stores: the LLM engine offered them. Loads: a tier had them, and the primary no "
        "row. A tier's name: that tier had no space.",
        "cps",
        (
            Query(each(rate("kvtier_primary_stores_refused_total")), "{{instance}} stores"),
            Query(each(rate("kvtier_primary_promotions_refused_total")), "{{instance}} loads"),
            Query(each(rate("kvtier_tier_failed_total", 'reason="no_space"'), "tier"), "{{instance}} {{tier}}"),
        ),
    ),
)
SLOW = (
    Panel(
        "What requests wait for loads",
        "Quantiles of how long a request waited until all its chunks had come, or the rest was computed. Requests that "
        "found everything in the primary waited for nothing and do not count.",
        "s",
        tuple(
            Query(quantile(share, "kvtier_load_wait_seconds"), f"{{{{instance}}}} p{share * 100:g}")
            for share in (0.5, 0.9, 0.99)
        ),
    ),
    Panel(
        "Loads: how long one takes",
        "Quantiles of the time from a load's arrival at the runner to its outcome, by tier.",
        "s",
        tuple(
            Query(
                quantile(share, "kvtier_transfer_seconds", 'operation="load"', by=("tier",)),
                f"{{{{instance}}}} {{{{tier}}}} p{share * 100:g}",
            )
            for share in (0.5, 0.99)
        ),
    ),
    Panel(
        "Stores and questions: how long one takes",
        "The 99th percentile of the time of stores into each tier, and of questions which chunks it has.",
        "s",
        tuple(
            Query(
                quantile(0.99, "kvtier_transfer_seconds", f'operation="{operation}"', by=("tier",)),
                f"{{{{instance}}}} {{{{tier}}}} {operation} p99",
            )
            for operation in ("store", "probe")
        ),
    ),
    Panel(
        "Chunks on their way",
        "Chunks that are being loaded, and chunks that wait to be stored or are being stored. A queue of stores that "
        "stays at its limit drops what comes on top.",
        "short",
        (
            Query(each(chosen("kvtier_tier_loading"), "tier"), "{{instance}} {{tier}} loading"),
            Query(each(chosen("kvtier_tier_storing"), "tier"), "{{instance}} {{tier}} storing"),
        ),
    ),
    Panel(
        "Bytes to and from tiers",
        "Bytes a second that each tier loads and stores.",
        "binBps",
        (Query(each(rate("kvtier_tier_bytes_total"), "tier", "operation"), "{{instance}} {{tier}} {{operation}}"),),
    ),
    Panel(
        "Loads that are not worth it",
        "The share of chunks that a tier has and that are computed all the same, because computing was expected to be "
        "faster; and the share of waits that were given up because the load was late.",
        "percentunit",
        (
            Query(
                f"{DECLINED} / ({DECLINED} + {each(rate('kvtier_tier_promoted_total'), 'tier')})",
                "{{instance}} {{tier}} declined",
            ),
            Query(
                f"{each(rate('kvtier_tier_given_up_total'))} / {each(rate('kvtier_load_wait_seconds_count'))}",
                "{{instance}} late",
            ),
        ),
    ),
    Panel(
        "Loads against what was expected",
        "Seconds that loads took, divided by the seconds that they were expected to take. Far above one, loads are "
        "begun that turn out late. The line is there while loads are weighed.",
        "percentunit",
        (
            Query(
                f"{each(rate('kvtier_tier_loaded_seconds_total'), 'tier')} / "
                f"{each(rate('kvtier_tier_expected_seconds_total'), 'tier')}",
                "{{instance}} {{tier}}",
            ),
        ),
    ),
    Panel(
        "Prefill speed",
        "Tokens of prompts that the LLM engine computes in a second, configured or learned. Loads are weighed against "
        "it. Without a line nobody knows it, and every load is made.",
        TOKENS_A_SECOND,
        (Query(f"max by (instance) ({chosen('kvtier_prefill_tokens_per_second')})", "{{instance}}"),),
    ),
)
ROWS = {"Is it worth it?": WORTH, "Is it well?": WELL, "Is it full?": FULL, "Is it slow?": SLOW}


def board() -> parts.Dashboard:
    made = (
        dashboard.Dashboard("kvtier")
        .uid("kvtier")
        .description("A kvtier engine, by itself or inside vLLM: is it worth it, is it well, is it full, is it slow?")
        .tags(["kvtier", "vllm", "kv-cache"])
        .link(dashboard.DashboardLink("What each row tells").type(parts.DashboardLinkType.LINK).url(PAGE))
        .editable()
        .tooltip(parts.DashboardCursorSync.CROSSHAIR)
        .time("now-1h", "now")
        .refresh("30s")
        .timezone("browser")
        .with_variable(dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus"))
        .with_variable(variable("job", "Job", "label_values(kvtier_build_info, job)"))
        .with_variable(variable("instance", "Instance", 'label_values(kvtier_build_info{job=~"$job"}, instance)'))
        .with_variable(variable("tier", "Tier", f"label_values(kvtier_tier_breaker{{{CHOSEN}}}, tier)"))
    )
    ids = count(1)
    for title, panels in ROWS.items():
        made.with_row(dashboard.Row(title).id(next(ids)))
        for panel in panels:
            made.with_panel(drawn(panel).id(next(ids)))
    return made.build()


def variable(name: str, label: str, query: str) -> dashboard.QueryVariable:
    return (
        dashboard.QueryVariable(name)
        .label(label)
        .datasource(DATASOURCE)
        .query(query)
        .refresh(parts.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(parts.VariableSort.ALPHABETICAL_ASC)
        .multi(True)
        .include_all(True)
        .all_value(".+")
        .current(parts.VariableOption(text="All", value="$__all", selected=True))
    )


Drawn = timeseries.Panel | stat.Panel | statetimeline.Panel


def drawn(panel: Panel) -> Drawn:
    made = look(panel)
    made.title(panel.title).description(panel.description).unit(panel.unit).datasource(DATASOURCE)
    made.span(COLUMNS // PANELS_A_ROW).height(STAT_HEIGHT if panel.kind == NUMBER else HEIGHT)
    instant = panel.kind in (NUMBER, NAMES)
    for letter, query in zip("ABCDEFGH", panel.queries, strict=False):
        target = prometheus.Dataquery().expr(query.expr).legend_format(query.legend)
        target.ref_id(letter).datasource(DATASOURCE)
        made.with_target(target.instant() if instant else target.range())
    return made


def look(panel: Panel) -> Drawn:
    if panel.kind == NAMES:
        return stat.Panel().text_mode(looks.BigValueTextMode.NAME).graph_mode(looks.BigValueGraphMode.NONE)
    if panel.kind == NUMBER:
        return stat.Panel().reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"])).decimals(2)
    if panel.kind == STATES:
        words = {
            value: parts.ValueMappingResult(text=word, color=color, index=index)
            for index, (value, (word, color)) in enumerate(panel.words.items())
        }
        return statetimeline.Panel().mappings([parts.ValueMap(options=words)]).show_value(looks.VisibilityMode.NEVER)
    lines = timeseries.Panel().line_width(1).show_points(looks.VisibilityMode.NEVER).min(0)
    lines.tooltip(common.VizTooltipOptions().mode(looks.TooltipDisplayMode.MULTI).sort(looks.SortOrder.DESCENDING))
    lines.legend(
        common.VizLegendOptions()
        .display_mode(looks.LegendDisplayMode.TABLE)
        .placement(looks.LegendPlacement.BOTTOM)
        .show_legend(True)
        .calcs(["mean", "lastNotNull"])
    )
    if panel.kind == STACK:
        lines.fill_opacity(40).stacking(common.StackingConfig().mode(looks.StackingMode.NORMAL))
    return lines


def text() -> str:
    """Return the board as its file holds it."""
    return json.dumps(board(), cls=JSONEncoder, indent=2) + "\n"


if __name__ == "__main__":
    BOARD.write_text(text())
