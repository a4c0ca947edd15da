"""What is frozen stays as it is, or `tests.frozen.freeze` writes it again with the change that explains it."""

import json

import pytest

from tests.frozen.freeze import FROZEN, GENERATED, REAL, names, promises
from tests.tools.replay.real import Traces

frozen = json.loads(FROZEN.read_text())


def test_public_names_are_those_that_were_frozen() -> None:
    assert names() == frozen["names"]


def test_the_conformance_suite_keeps_every_frozen_promise() -> None:
    assert promises() == frozen["promises"]


@pytest.mark.parametrize("name", GENERATED)
def test_the_generated_workload_gives_the_frozen_figures(name: str, outside: None) -> None:
    assert GENERATED[name]() == frozen["generated"][name]


@pytest.mark.parametrize("name", REAL)
def test_a_real_trace_gives_the_frozen_figures(name: str, traces: Traces, outside: None) -> None:
    file, figures = REAL[name]
    assert figures(str(traces / file)) == frozen["real"][name]
