"""The prefill speed, learned from the LLM engine's steps."""

import math

import pytest

from kvtier.engine.prefill import TOKENS_MIN, PrefillSpeed

FULL, DECODE_S = 2_048, 0.02  # Tokens of a full step, and what a step that only decodes takes.


def step_s(tokens: int, tokens_per_s: float = 20_000.0) -> float:
    return DECODE_S + tokens / tokens_per_s


def test_the_speed_is_not_known_before_some_thousand_tokens_were_noted() -> None:
    speed = PrefillSpeed()
    speed.note(TOKENS_MIN - 1, 1.0, 0.0)
    assert speed.tokens_per_s is None
    speed.note(TOKENS_MIN, 1.0, 0.0)
    assert speed.tokens_per_s is not None


def test_a_configured_speed_is_not_changed_by_measurements() -> None:
    speed = PrefillSpeed(20_000.0)
    for _ in range(100):
        speed.note(FULL, 1.0, 0.0)
    assert speed.tokens_per_s == 20_000.0


def test_steps_that_mostly_decode_do_not_make_prefill_look_slow() -> None:
    speed = PrefillSpeed()
    for number in range(20_000):
        tokens = FULL if number % 20 == 0 else 16
        speed.note(tokens, step_s(tokens), 0.0)
    assert speed.tokens_per_s == pytest.approx(FULL / step_s(FULL), rel=0.02)


def test_where_all_prompts_are_short_their_steps_count() -> None:
    speed = PrefillSpeed()
    for _ in range(1_000):
        speed.note(64, step_s(64), 0.0)
    assert speed.tokens_per_s == pytest.approx(64 / step_s(64), rel=0.02)


def test_another_speed_is_learned_within_some_half_lives() -> None:
    speed = PrefillSpeed()
    for tokens_per_s in (20_000.0, 5_000.0):
        for _ in range(3_000_000 // FULL):
            speed.note(FULL, FULL / tokens_per_s, 0.0)
    assert speed.tokens_per_s == pytest.approx(5_000.0, rel=0.05)


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.inf, math.nan])
def test_a_step_without_a_valid_duration_is_ignored(seconds: float) -> None:
    speed = PrefillSpeed()
    speed.note(100_000, seconds, 0.0)
    assert speed.tokens_per_s is None


def test_no_step_is_so_fast_that_computing_takes_no_time() -> None:
    """A clock may stand nearly still. Later steps say how fast computing really is."""
    speed = PrefillSpeed()
    for _ in range(4):
        speed.note(FULL, 5e-324, 0.0)
    assert speed.tokens_per_s == pytest.approx(1e9)
    for step in range(200):
        speed.note(FULL, FULL / 20_000, 100.0 + step)
    assert speed.tokens_per_s == pytest.approx(20_000, rel=0.05)


def test_a_step_without_prompt_tokens_is_ignored() -> None:
    speed = PrefillSpeed()
    for _ in range(4):
        speed.note(0, 1.0, 0.0)
        speed.note(FULL, 0.1, 0.0)
    assert speed.tokens_per_s == pytest.approx(FULL / 0.1)


def test_a_step_that_hung_counts_as_one_that_was_slow() -> None:
    speed = known(20_000.0)
    speed.note(FULL, 60.0, 0.0)
    assert speed.tokens_per_s is not None
    assert speed.tokens_per_s > 0.7 * 20_000.0


@pytest.mark.parametrize("tokens", [FULL, 16_384])
def test_a_first_step_that_compiled_is_ignored(tokens: int) -> None:
    speed = PrefillSpeed()
    speed.note(tokens, 60.0, 0.0)
    assert speed.tokens_per_s is None
    for _ in range(2):
        speed.note(tokens, tokens / 20_000.0, 60.0)
    assert speed.tokens_per_s == pytest.approx(20_000.0)


def test_after_a_pause_one_step_outweighs_all_before_it() -> None:
    speed = known(20_000.0)
    speed.note(FULL, FULL / 40_000.0, 60.0)
    assert speed.tokens_per_s == pytest.approx(40_000.0, rel=0.05)


def known(tokens_per_s: float) -> PrefillSpeed:
    speed = PrefillSpeed()
    for _ in range(100):
        speed.note(FULL, FULL / tokens_per_s, 0.0)
    return speed


def explored(speed: PrefillSpeed, tokens: int, lost_s: float, until_s: int) -> list[int]:
    """Ask each second whether to compute so many tokens, and return when it was so."""
    return [second for second in range(1, until_s) if speed.explores(tokens, lost_s, float(second))]


def test_a_loadable_prompt_is_computed_after_a_hundred_times_its_cost_without_a_measurement() -> None:
    assert explored(known(20_000.0), FULL, 0.5, 200) == [50, 150]
    assert explored(known(20_000.0), FULL, 0.001, 4) == [1, 3]


def test_while_prompts_are_computed_none_is_computed_for_a_measurement() -> None:
    speed = known(20_000.0)
    for second in range(1_000):
        speed.note(FULL, 0.1, float(second))
        assert not speed.explores(FULL, 0.5, second + 0.9)


def test_too_few_tokens_are_never_computed_for_a_measurement() -> None:
    assert explored(known(20_000.0), FULL // 5, 0.0, 1_000) == []


def test_a_configured_speed_needs_no_measurement() -> None:
    assert explored(PrefillSpeed(20_000.0), FULL, 0.0, 1_000) == []


def test_a_prompt_far_longer_than_any_step_is_tried_ever_less_often() -> None:
    """A prompt that is computed in many steps never makes one of its own size."""
    speed = known(20_000.0)
    assert explored(speed, 10 * FULL, 100.0, 1_000) == [1, 3, 7, 15, 31, 63, 127, 255, 511]
