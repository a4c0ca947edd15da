"""Each alert goes off for what it is there for and for nothing else, by Prometheus's own word; and it leads to help."""

import json
import re
import subprocess
from typing import NamedTuple

import pytest
import yaml
from check_jsonschema import main as check_jsonschema
from click.testing import CliRunner

from kvtier.engine.tier import BreakerState
from tests.monitoring.queries import EXAMPLES, PAGE, RULES

HOME = "https://github.com/kvtier/kvtier/blob/main/"
INSTANCE = "@"  # Each story has its own.
TARGET = f'job="kvtier",instance="{INSTANCE}"'
DISK = 'tier="disk"'
MINUTES = 120  # Of each story; every value below is one minute's.


class Story(NamedTuple):
    """What happened in two hours, and which alert is on at the end, if any."""

    alert: str
    series: dict[str, str]


def tier(name, *labels):
    return f"kvtier_tier_{name}{{{','.join((TARGET, DISK, *labels))}}}"


def breaker(states):
    return {tier("breaker", f'state="{state.value}"'): states.get(state.value, "0x120") for state in BreakerState}


def primary(name, *labels):
    return f"kvtier_primary_{name}{{{','.join((TARGET, *labels))}}}"


def rows(quarantined):
    counts = {"ready": 90 - quarantined, "filling": 0, "free": 10, "quarantined": quarantined}
    return {primary("rows", f'state="{state}"'): f"{count}x{MINUTES}" for state, count in counts.items()}


UP, LOST, WAITS = (
    f"kvtier_{name}{{{TARGET}}}" for name in ("runner_up", "runners_lost_total", "load_wait_seconds_count")
)
FAILED = tier("failed_total", 'reason="deadline"')
CORRUPT = tier("failed_total", 'reason="corrupt"')
NO_SPACE = tier("failed_total", 'reason="no_space"')
MOVED = {tier("loaded_total"): "0+600x120", tier("stored_total"): "0+600x120"}

TRIED = "0x103 1 0x15"
FIRES = [
    Story("KvtierRunnerDown", {UP: "1x117 0 0 0"}),
    Story("KvtierRunnerKeepsEnding", {UP: "1x120", LOST: "0x100 1 1 2 3 4 4 4 4 4 4 4 4 4 4 4 4 4 4 4 4"}),
    Story("KvtierBreakerOpen", breaker({"closed": "1x100 0x19", "open": "0x100 1x2 0 1x15", "half_open": TRIED})),
    Story("KvtierTransfersFail", {FAILED: "0+100x120", **MOVED}),
    Story("KvtierTransfersFail", {FAILED: "0+1x120", tier("loaded_total"): "0x120", tier("stored_total"): "0x120"}),
    Story("KvtierChunksCorrupt", {CORRUPT: "_x118 1 1", **MOVED}),  # The first of all.
    Story("KvtierChunksCorrupt", {CORRUPT: "5x110 6x9", **MOVED}),
    Story("KvtierTierRefuses", {NO_SPACE: "0+1x120", **MOVED}),
    Story("KvtierPrimaryRefuses", {primary("stores_total"): "0+90x120", primary("stores_refused_total"): "0+10x120"}),
    Story("KvtierRowsQuarantined", rows(quarantined=6)),
    Story("KvtierChunksDropped", {tier("dropped_total", 'reason="budget"'): "0+200x120", **MOVED}),
    Story("KvtierLoadsDeclined", {tier("declined_total"): "0+60x120", tier("promoted_total"): "0+40x120"}),
    Story("KvtierLoadsLate", {tier("given_up_total"): "0+20x120", WAITS: "0+100x120"}),
]  # fmt: skip
QUIET = [
    Story("KvtierRunnerDown", {UP: "1x110 0 1x8"}),  # Another took its place.
    Story("KvtierRunnerKeepsEnding", {UP: "1x120", LOST: "0+1x2 3x117"}),  # Long ago.
    Story("KvtierBreakerOpen", breaker({"closed": "1x100 0x5 1x13", "open": "0x100 1x5 0x13"})),  # It mended itself.
    Story("KvtierTransfersFail", {FAILED: "0+10x120", **MOVED}),
    Story("KvtierTransfersFail", {FAILED: "900x120", tier("loaded_total"): "0x120", tier("stored_total"): "0x120"}),
    Story("KvtierChunksCorrupt", {CORRUPT: "0+1x40 40x79", **MOVED}),  # More than an hour ago.
    Story("KvtierTierRefuses", {NO_SPACE: "0x100 1x19", **MOVED}),  # Once.
    Story("KvtierPrimaryRefuses", {primary("stores_total"): "0+99x120", primary("stores_refused_total"): "0+1x120"}),
    Story("KvtierRowsQuarantined", rows(quarantined=5)),
    Story("KvtierChunksDropped", {tier("dropped_total", 'reason="budget"'): "0+6x120", **MOVED}),
    Story("KvtierChunksDropped", {tier("dropped_total", 'reason="breaker"'): "0+900x120", **MOVED}),  # Another alert's.
    Story("KvtierLoadsDeclined", {tier("declined_total"): "0+40x120", tier("promoted_total"): "0+60x120"}),
    Story("KvtierLoadsLate", {tier("given_up_total"): "0+1x120", WAITS: "0+100x120"}),
]  # fmt: skip


def at_once(stories):
    """Have all stories happen at once, each to an instance of its own; say who is to be told of what."""
    return {
        "interval": "1m",
        "input_series": [
            {"series": series.replace(INSTANCE, f"a:{index}"), "values": values}
            for index, story in enumerate(stories)
            for series, values in story.series.items()
        ],
        "promql_expr_test": [
            {
                "expr": 'count by (instance, alertname) (ALERTS{alertstate="firing"})',
                "eval_time": f"{MINUTES - 1}m",
                "exp_samples": [
                    {"labels": f'{{alertname="{story.alert}",instance="a:{index}"}}', "value": 1}
                    for index, story in enumerate(stories)
                    if story in FIRES
                ],
            }
        ],
    }


def run(*command):
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_there_is_a_story_of_every_alert_that_goes_off_and_one_of_every_that_does_not():
    alerts = [rule["alert"] for rule in RULES]
    assert list(dict.fromkeys(story.alert for story in FIRES)) == alerts
    assert list(dict.fromkeys(story.alert for story in QUIET)) == alerts


@pytest.mark.parametrize("rule", RULES, ids=[rule["alert"] for rule in RULES])
def test_an_alert_leads_to_what_to_do(rule):
    assert rule["labels"]["severity"] in {"critical", "warning", "info"}
    page, _, anchor = rule["annotations"]["runbook_url"].removeprefix(HOME).partition("#")
    assert (page, anchor) == (str(PAGE.relative_to(EXAMPLES.parents[1])), rule["alert"].lower())
    assert rule["alert"] in re.findall(r"^#+ `?(\w+)`?$", PAGE.read_text(), re.MULTILINE)


def test_the_compose_file_is_one_and_mounts_what_there_is():
    path = EXAMPLES / "compose.yaml"
    checked = CliRunner().invoke(check_jsonschema, ["--builtin-schema", "vendor.compose-spec", str(path)])
    assert checked.exit_code == 0, checked.output
    services = yaml.safe_load(path.read_text())["services"]
    mounted = [volume.partition(":")[0] for service in services.values() for volume in service["volumes"]]
    assert all((EXAMPLES / name).is_file() for name in mounted if name.startswith("./"))


def test_prometheus_accepts_the_alerts_and_the_configuration(programs):
    _, promtool = programs
    run(promtool, "check", "rules", EXAMPLES / "alerts.yaml")
    run(promtool, "check", "config", EXAMPLES / "prometheus.yaml")


def test_each_alert_goes_off_for_its_reason_and_no_other_does(programs, tmp_path):
    _, promtool = programs
    tests = [at_once([*FIRES, *QUIET])]
    told = {"rule_files": [str(EXAMPLES / "alerts.yaml")], "evaluation_interval": "1m", "tests": tests}
    (tmp_path / "stories.yaml").write_text(json.dumps(told))
    run(promtool, "test", "rules", tmp_path / "stories.yaml")
