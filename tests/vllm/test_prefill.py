"""The prefill meter: what steps say of how fast prompts are computed. Times are given, and no engine is needed."""

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest

from kvtier.integrations.vllm.connector import MeasuredPrefill, PrefillMeter, StepTokens, step_tokens


def output(counts: dict[str, int], **more: Any) -> Any:
    """Return a scheduler's output with these tokens for each request."""
    fields = {
        "num_scheduled_tokens": counts,
        "total_num_scheduled_tokens": sum(counts.values()),
        "scheduled_spec_decode_tokens": {},
        "scheduled_encoder_inputs": {},
        "has_sync_kv_loads": False,
    }
    return SimpleNamespace(**fields | more)


Step = tuple[int, int, float, float]  # MeasuredPrefill, decode; when it was scheduled and answered.


def measured(steps: Iterable[Step], steps_max: int = 1) -> list[MeasuredPrefill]:
    """Run steps past a meter, each at its times, and return what it says."""
    meter, said = PrefillMeter(steps_max), []
    listed = list(steps)
    calls = [(begun, 1, index) for index, (*_, begun, _) in enumerate(listed)]
    calls += [(ended, 0, index) for index, (*_, ended) in enumerate(listed)]
    for now, begins, index in sorted(calls):
        if begins:
            meter.scheduled(StepTokens(*listed[index][:2]), now)
        elif found := meter.answered(now):
            said.append(found)
    return said


def speeds(said: Iterable[MeasuredPrefill]) -> list[float]:
    return [pytest.approx(each.tokens / each.seconds) for each in said]


def test_a_prompt_in_pieces_is_prefill_in_every_one_of_its_steps():
    assert step_tokens(output({"a": 2_048})) == (2_048, 0)
    assert measured([(2_048, 0, 0.0, 0.1), (2_048, 0, 0.1, 0.2), (904, 0, 0.2, 0.25)]) == [
        MeasuredPrefill(2_048, pytest.approx(0.1)),
        MeasuredPrefill(2_048, pytest.approx(0.1)),
        MeasuredPrefill(904, pytest.approx(0.05)),
    ]


def test_requests_that_decode_are_told_from_those_that_prefill():
    assert step_tokens(output({"a": 1, "b": 1, "c": 500})) == (500, 2)
    assert step_tokens(output({"a": 1, "b": 1})) == (0, 2)
    assert step_tokens(output({})) == (0, 0)


def test_tokens_that_a_draft_proposed_are_no_prefill():
    drafts = {"a": [-1, -1, -1], "b": [7]}
    assert step_tokens(output({"a": 4, "b": 2, "c": 500}, scheduled_spec_decode_tokens=drafts)) == (500, 6)


def test_what_a_preempted_request_computes_again_is_prefill():
    """It has answered already, so that its answers cannot tell; its number of tokens does."""
    assert step_tokens(output({"preempted": 700, "a": 1})) == (700, 1)


@pytest.mark.parametrize("work", [{"scheduled_encoder_inputs": {"a": [0]}}, {"has_sync_kv_loads": True}])
def test_a_step_that_does_other_work_too_says_nothing(work):
    assert step_tokens(output({"a": 500}, **work)) == (0, 0)


def test_time_without_a_step_does_not_count():
    assert speeds(measured([(1_000, 0, 0.0, 0.5), (1_000, 0, 90.0, 90.5)])) == [2_000, 2_000]


def test_steps_without_tokens_end_no_later_than_they_do():
    """An idle engine steps for its transfers' sake: such a step is no prefill, and no decoding."""
    said = measured([(0, 0, 0.0, 5.0), (1_000, 0, 5.0, 5.5), (0, 0, 5.5, 9.0), (900, 10, 9.0, 9.5)])
    assert said == [MeasuredPrefill(1_000, 0.5), MeasuredPrefill(900, 0.5)]


def test_a_step_that_is_scheduled_while_another_runs_counts_its_own_time_only():
    """Asynchronous scheduling: a step queues behind the one before, and begins when that is answered."""
    steps = [(1_000, 0, 0.0, 1.0), (1_000, 0, 0.1, 2.0), (1_000, 0, 1.1, 3.0), (1_000, 0, 50.0, 51.0)]
    assert speeds(measured(steps, steps_max=2)) == [1_000] * 4


def test_the_time_of_decoding_beside_it_is_not_prefills():
    decodes = [(0, 40, step / 64, (step + 1) / 64) for step in range(16)]
    (said,) = measured([*decodes, (1_960, 40, 0.25, 0.375)])
    assert said == MeasuredPrefill(
        1_960, 0.125 - 0.125 * 40 / 2_000
    )  # Its share is less than what a step that decodes takes.
    (said,) = measured([*decodes, (100, 40, 0.25, 0.375)])
    assert said == MeasuredPrefill(100, 0.125 - 1 / 64)


def test_decoding_is_charged_as_it_is_lately():
    slow = [(0, 900, step * 1.0, step + 1.0) for step in range(50)]
    fast = [(0, 900, 50 + step * 0.01, 50 + step * 0.01 + 0.01) for step in range(80)]
    (said,) = measured([*slow, *fast, (100, 900, 51.0, 51.1)])
    assert said == MeasuredPrefill(100, pytest.approx(0.09, rel=0.01))


def test_an_answer_that_never_comes_does_not_shift_those_that_follow():
    meter = PrefillMeter(steps_max=1)
    meter.scheduled(StepTokens(5_000, 0), 0.0)
    meter.scheduled(StepTokens(1_000, 0), 10.0)
    assert meter.answered(10.5) == MeasuredPrefill(1_000, 0.5)


def test_an_answer_without_a_step_says_nothing():
    assert PrefillMeter(steps_max=1).answered(1.0) is None
