"""The prefill speed, learned from the LLM engine's steps."""

import math

import pytest

from kvtier.engine.prefill import TOKENS_MIN, PrefillSpeed

FULL, DECODE_S = 2_048, 0.02  # Tokens of a full step, and what a step that only decodes takes.


def step_s(tokens: int, tokens_per_s: float = 20_000.0) -> float:
    return DECODE_S + tokens / tokens_per_s


def test_the_speed_is_not_known_before_some_thousand_tokens_were_noted() -> None:
    speed = PrefillSpeed()
    speed.note(TOKENS_MIN - 1, 1.0)
    assert speed.tokens_per_s is None
    speed.note(TOKENS_MIN, 1.0)
    assert speed.tokens_per_s is not None


def test_a_configured_speed_is_not_changed_by_what_is_noted() -> None:
    speed = PrefillSpeed(20_000.0)
    for _ in range(100):
        speed.note(FULL, 1.0)
    assert speed.tokens_per_s == 20_000.0


def test_steps_that_mostly_decode_do_not_make_prefill_look_slow() -> None:
    speed = PrefillSpeed()
    for number in range(20_000):
        tokens = FULL if number % 20 == 0 else 16
        speed.note(tokens, step_s(tokens))
    assert speed.tokens_per_s == pytest.approx(FULL / step_s(FULL), rel=0.02)


def test_where_all_prompts_are_short_their_steps_count() -> None:
    speed = PrefillSpeed()
    for _ in range(1_000):
        speed.note(64, step_s(64))
    assert speed.tokens_per_s == pytest.approx(64 / step_s(64), rel=0.02)


def test_another_speed_is_learned_within_some_half_lives() -> None:
    speed = PrefillSpeed()
    for tokens_per_s in (20_000.0, 5_000.0):
        for _ in range(3_000_000 // FULL):
            speed.note(FULL, FULL / tokens_per_s)
    assert speed.tokens_per_s == pytest.approx(5_000.0, rel=0.05)


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.inf, math.nan])
def test_a_step_of_no_time_says_nothing(seconds: float) -> None:
    speed = PrefillSpeed()
    speed.note(100_000, seconds)
    assert speed.tokens_per_s is None


def test_a_step_without_tokens_of_prompts_says_nothing() -> None:
    speed = PrefillSpeed()
    for _ in range(4):
        speed.note(0, 1.0)
        speed.note(FULL, 0.1)
    assert speed.tokens_per_s == pytest.approx(FULL / 0.1)
