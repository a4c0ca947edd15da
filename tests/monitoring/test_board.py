"""The board is what its script gives, and a person who opens it is told what each panel is."""

import re
import runpy

import pytest

from tests.monitoring.queries import BOARD, EXAMPLES, PANELS, of_the_board

QUESTIONS = ["Is it worth it?", "Is it well?", "Is it full?", "Is it slow?"]
VARIABLES = ["datasource", "job", "instance", "tier"]


def test_the_script_still_gives_the_board_byte_by_byte():
    """`python examples/monitoring/make_board.py` writes it anew."""
    script = runpy.run_path(str(EXAMPLES / "make_board.py"))
    assert (EXAMPLES / "board.json").read_text() == script["text"]()


def test_the_board_answers_four_questions_in_rows():
    assert [panel["title"] for panel in BOARD["panels"] if panel["type"] == "row"] == QUESTIONS
    assert [variable["name"] for variable in BOARD["templating"]["list"]] == VARIABLES
    ids, cells = [panel["id"] for panel in BOARD["panels"]], [cell for panel in BOARD["panels"] for cell in area(panel)]
    assert len(set(ids)) == len(ids)
    assert len(set(cells)) == len(cells), "no panel lies on another"


def area(panel):
    at = panel["gridPos"]
    return [(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])]


@pytest.mark.parametrize("panel", PANELS, ids=[panel["title"] for panel in PANELS])
def test_a_panel_has_a_unit_and_a_description_and_asks_the_chosen_data_source(panel):
    assert panel["fieldConfig"]["defaults"]["unit"]
    assert panel["description"].endswith(".")
    asked = {panel["datasource"]["uid"], *(target["datasource"]["uid"] for target in panel["targets"])}
    assert asked == {"${datasource}"}


def test_states_of_several_engines_at_one_address_are_not_added_up():
    """Two breakers that are half open would look like one that is open."""
    asked = [target["expr"] for panel in PANELS if panel["type"] == "state-timeline" for target in panel["targets"]]
    assert len(asked) == 2
    assert [expr for expr in asked if not re.match(r"(max|min) by \(", expr)] == []


def test_every_query_goes_by_the_chosen_jobs_and_instances_and_names_the_instance():
    for query in of_the_board():
        for name, matchers in query.selectors():
            assert {("job", "=~", "$job"), ("instance", "=~", "$instance")} <= set(matchers), (query.where, name)
        assert "{{instance}}" in query.legend, query.where
