"""The queries of the board, the alerts and their page, and what each of them names."""

import json
import re
from pathlib import Path
from typing import NamedTuple

import yaml
from prometheus_client.parser import text_string_to_metric_families

from kvtier.engine.tier import BreakerState
from kvtier.engine.traffic import Operation
from kvtier.runner.messages import Code

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "monitoring"
PAGE = ROOT / "docs" / "how-to" / "monitor.md"
BOARD = json.loads((EXAMPLES / "board.json").read_text())
PANELS = [panel for panel in BOARD["panels"] if panel["type"] != "row"]
RULES = [rule for group in yaml.safe_load((EXAMPLES / "alerts.yaml").read_text())["groups"] for rule in group["rules"]]

OF_PROMETHEUS = {"job", "instance"}  # Labels that a scrape adds.
VALUES = {  # Of labels whose series come with the first count: what there may be.
    "reason": {code.name.lower() for code in Code} | {"budget", "pinned", "breaker", "overdue", "bridge", "runner"},
    "operation": {operation.value for operation in Operation},
    "state": {state.value for state in BreakerState},
    "what": {"evicted"},
}
VARIABLES = {"job": ".+", "instance": ".+", "tier": ".+", "__rate_interval": "10s", "__range": "5m"}


class Query(NamedTuple):
    where: str
    expr: str
    legend: str = ""

    @property
    def asked(self):
        """The query as Grafana asks it, with a value for each variable."""
        return re.sub(r"\$(\w+)", lambda found: VARIABLES[found[1]], self.expr)

    def selectors(self):
        for name, matchers in re.findall(r"\b(kvtier_\w+)(?:\{([^}]*)\})?", self.expr):
            yield name, re.findall(r'(\w+)\s*(=~|!~|!=|=)\s*"([^"]*)"', matchers)

    @property
    def labels(self):
        grouped = re.findall(r"\b(?:by|on|without|ignoring)\s*\(([^)]*)\)", self.expr)
        return {label.strip() for group in grouped for label in group.split(",")} | set(
            re.findall(r"\{\{\s*(?:\$labels\.)?(\w+)\s*\}\}", self.legend)
        )


def of_the_board():
    return [
        Query(f"{panel['title']} {target['refId']}", target["expr"], target["legendFormat"])
        for panel in PANELS
        for target in panel["targets"]
    ]


def of_the_alerts():
    return [Query(rule["alert"], rule["expr"], " ".join(rule["annotations"].values())) for rule in RULES]


def of_the_page():
    blocks = re.findall(r"^``` ?\{? ?\.?promql[^\n]*\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    return [Query(f"{PAGE.name} {index}", block) for index, block in enumerate(blocks)]


EVERY = [*of_the_board(), *of_the_alerts(), *of_the_page()]


def samples_of(page):
    found = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            found.setdefault(sample.name, []).append(sample.labels)
    return found


def unknown(queries, samples):
    return [complaint for query in queries for complaint in _unknown(query, samples)]


def _unknown(query, samples):
    known = set(OF_PROMETHEUS)
    for name, matchers in query.selectors():
        if name not in samples:
            yield f"{query.where}: no metric {name}"
            continue
        labels = {label for series in samples[name] for label in series}
        known |= labels
        for label, operator, value in matchers:
            if label not in labels | OF_PROMETHEUS:
                yield f"{query.where}: {name} has no label {label}"
            elif "$" not in value and label not in OF_PROMETHEUS:
                there = {series.get(label, "") for series in samples[name]} | VALUES.get(label, set())
                named = set(value.split("|")) if "~" in operator else {value}
                if missing := named - there:
                    yield f"{query.where}: {name} has no {label} {', '.join(sorted(missing))}"
    for label in sorted(query.labels - known):
        yield f"{query.where}: none of its metrics has a label {label}"
