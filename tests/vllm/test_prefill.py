"""The prefill meter: what steps say of how fast prompts are computed. Times are given, and no engine is needed."""

from types import SimpleNamespace

import pytest

from kvtier.integrations.vllm.connector import PrefillMeter, step_tokens

Step = tuple[int, int, float, float]  # Tokens of prompts, of answers; when it was scheduled and answered.


def measured(steps, steps_max=1):
    meter = PrefillMeter(steps_max)
    calls = [(begun, 1, (prefill, decode)) for prefill, decode, begun, _ in steps]
    calls += [(ended, 0, ()) for *_, ended in steps]
    said = [meter.scheduled(*tokens, now) if begins else meter.answered(now) for now, begins, tokens in sorted(calls)]
    return [each for each in said if each]


@pytest.mark.parametrize(
    ("counts", "more", "tokens"),
    [
        ({"a": 2_048}, {}, (2_048, 0)),
        ({"a": 1, "b": 1, "c": 500}, {}, (500, 2)),
        ({"a": 1, "b": 1}, {}, (0, 2)),
        ({}, {}, (0, 0)),
        # Tokens that a draft proposed are no prefill.
        ({"a": 4, "b": 2, "c": 500}, {"scheduled_spec_decode_tokens": {"a": [-1] * 3, "b": [7]}}, (500, 6)),
        # What a preempted request computes again is; that it has answered already cannot tell.
        ({"preempted": 700, "a": 1}, {}, (700, 1)),
        ({"a": 500}, {"scheduled_encoder_inputs": {"a": [0]}}, (0, 0)),
        ({"a": 500}, {"has_sync_kv_loads": True}, (0, 0)),
    ],
)
def test_a_steps_tokens_are_of_prompts_or_of_answers(counts, more, tokens):
    fields = {
        "num_scheduled_tokens": counts,
        "total_num_scheduled_tokens": sum(counts.values()),
        "scheduled_spec_decode_tokens": {},
        "scheduled_encoder_inputs": {},
        "has_sync_kv_loads": False,
    }
    assert step_tokens(SimpleNamespace(**fields | more)) == tokens


DECODES: list[Step] = [(0, 40, step / 64, (step + 1) / 64) for step in range(16)]
SLOW: list[Step] = [(0, 900, step * 1.0, step + 1.0) for step in range(50)]
FAST: list[Step] = [(0, 900, 50 + step / 100, 50 + (step + 1) / 100) for step in range(80)]


STEPS: dict[str, tuple[list[Step], int, list[tuple[int, float]]]] = {
    "a prompt in pieces": (
        [(2_048, 0, 0.0, 0.5), (2_048, 0, 0.5, 1.0), (904, 0, 1.0, 1.25)],
        1,
        [(2_048, 0.5), (2_048, 0.5), (904, 0.25)],
    ),
    "time without a step": ([(1_000, 0, 0.0, 0.5), (1_000, 0, 90.0, 90.5)], 1, [(1_000, 0.5)] * 2),
    "steps for transfers alone": (
        [(0, 0, 0.0, 5.0), (1_000, 0, 5.0, 5.5), (0, 0, 5.5, 9.0), (900, 10, 9.0, 9.5)],
        1,
        [(1_000, 0.5), (900, 0.5)],
    ),
    "steps that queue behind the one before": (
        [(1_000, 0, 0.0, 1.0), (1_000, 0, 0.125, 2.0), (1_000, 0, 1.125, 3.0), (1_000, 0, 50.0, 51.0)],
        2,
        [(1_000, 1.0)] * 4,
    ),
    "decoding beside it, by its share": (
        [*DECODES, (1_960, 40, 0.25, 0.375)],
        1,
        [(1_960, 0.125 - 0.125 * 40 / 2_000)],
    ),
    "decoding beside it, by a step's time": ([*DECODES, (100, 40, 0.25, 0.375)], 1, [(100, 0.125 - 1 / 64)]),
    "decoding as it is lately": ([*SLOW, *FAST, (100, 900, 51.0, 51.1)], 1, [(100, pytest.approx(0.09, rel=0.01))]),
}


@pytest.mark.parametrize(("steps", "steps_max", "prefill"), STEPS.values(), ids=STEPS)
def test_prefill_has_its_own_time_alone(steps, steps_max, prefill):
    assert measured(steps, steps_max) == prefill


def test_an_answer_that_never_comes_does_not_shift_those_that_follow():
    meter = PrefillMeter(steps_max=1)
    assert meter.answered(0.0) is None
    meter.scheduled(5_000, 0, 0.0)
    meter.scheduled(1_000, 0, 10.0)
    assert meter.answered(10.5) == (1_000, 0.5)
