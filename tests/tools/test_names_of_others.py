"""Names of traces, files, models and tiers come from others: what a terminal would obey in them is shown, not sent."""

import io
import json
import logging

import pytest
from prometheus_client import CollectorRegistry, Gauge
from rich.text import Text

from kvtier.testing.conformance.lender import keys_of
from kvtier.tools.outputs import Screen, logged, plain_table
from kvtier.tools.replay.traces import TraceRequest
from tests.serving import served
from tests.tools.command import run
from tests.tools.replay.written import write_trace

TITLE = "\x1b]0;owned\x1b\\"  # Obeyed by every terminal: it is the window's title from then on.
CLEARED = "\x9b2J"  # The same for one that takes single characters of C1: the screen is empty.
TURNED = "\u202e"  # What stands behind it is shown from right to left.
NAME = f"a{TITLE}b{CLEARED}c{TURNED}d"
SHOWN = r"a\x1b]0;owned\x1b\b\x9b2Jc\u202ed"


@pytest.fixture
def told(capsys):
    def told(*args):
        run(*args)
        out, err = capsys.readouterr()
        assert {letter for letter in out + err if not letter.isprintable()} <= {"\n"}
        return out + err

    return told


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / f"{NAME}.jsonl"
    write_trace(path, [TraceRequest(timestamp_ms=1, input_length=512, output_length=1, hash_ids=(0,))])
    return path


@pytest.mark.parametrize("command", ["policies", pytest.param("replay", marks=pytest.mark.outside)])
def test_a_traces_name_is_shown_as_it_is(told, trace, command):
    assert SHOWN in told(command, trace)


def test_a_model_and_files_of_a_directory_are_shown_as_they_are(told, root, store):
    first, second = store(keys_of(2), model=f"org/{NAME}")
    second.rename(second.with_name(f"{NAME}.bin"))
    assert f"org/{SHOWN}" in told("du", root)
    for command in ("du", "ls"):
        in_json = told(command, root, "--json")
        assert r"\u009b2Jc\u202ed" in in_json
        json.loads(in_json)
    for command in ("ls", "verify"):
        told(command, root)
    assert first.name.removesuffix(".bin")[:8] in told("ls", root)


def test_names_in_an_engines_metrics_are_shown_escaped(told):
    registry = CollectorRegistry()
    Gauge("kvtier_tier_breaker", "1.", ("tier", "state"), registry=registry).labels(NAME, "closed").set(1)
    with served(registry) as port:
        assert SHOWN in told("top", "--once", "--interval", "100ms", port)


def test_a_terminal_has_the_screens_own_colours_and_none_of_a_names(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    stream = io.StringIO()
    screen = Screen(file=stream, force_terminal=True, color_system="standard", width=200)
    table = plain_table("tier")
    table.add_row(Text(NAME, "red"))
    screen.print(table)
    screen.out(NAME, highlight=False)
    screen.print(f"[red]{NAME}[/] :smile:", highlight=False)
    written = stream.getvalue()
    assert (written.count(SHOWN), written.count(f"\x1b[31m{SHOWN}\x1b[0m")) == (3, 2)
    assert ":smile:" in written
    assert not any(order in written for order in (TITLE, CLEARED, TURNED))


def test_a_log_line_that_quotes_a_name_obeys_nothing_in_it(capsys):
    with logged(verbose=0, quiet=False):
        logging.getLogger("kvtier").warning("%s: removed", NAME)
    assert capsys.readouterr().err == f"{SHOWN}: removed\n"
