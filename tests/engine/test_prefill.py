import math

import pytest

from kvtier.engine.prefill import TOKENS_MIN, PrefillSpeed

FULL, DECODE_S = 2_048, 0.02  # Tokens of a full step, and what a step that only decodes takes.


def step_s(tokens):
    return DECODE_S + tokens / 20_000.0


def known(tokens_per_s=20_000.0):
    speed = PrefillSpeed()
    for _ in range(100):
        speed.note(FULL, FULL / tokens_per_s, 0.0)
    return speed


def test_the_speed_is_not_known_before_some_thousand_tokens_were_noted():
    speed = PrefillSpeed()
    speed.note(TOKENS_MIN - 1, 1.0, 0.0)
    assert speed.tokens_per_s is None
    speed.note(TOKENS_MIN, 1.0, 0.0)
    assert speed.tokens_per_s is not None


def test_a_configured_speed_is_not_changed_by_measurements_and_needs_none():
    speed = PrefillSpeed(20_000.0)
    for _ in range(100):
        speed.note(FULL, 1.0, 0.0)
    assert speed.tokens_per_s == 20_000.0
    assert explored(speed, FULL, 0.0, 1_000) == []


@pytest.mark.parametrize(("full", "short"), [(FULL, 16), (64, 64)], ids=["mostly decoding", "all prompts are short"])
def test_the_steps_with_most_prompt_tokens_say_how_fast_prefill_is(full, short):
    speed = PrefillSpeed()
    for number in range(20_000):
        tokens = full if number % 20 == 0 else short
        speed.note(tokens, step_s(tokens), 0.0)
    assert speed.tokens_per_s == pytest.approx(full / step_s(full), rel=0.02)


def test_another_speed_is_learned_within_some_half_lives_or_by_one_step_after_a_pause():
    speed = known()
    for _ in range(3_000_000 // FULL):
        speed.note(FULL, FULL / 5_000.0, 0.0)
    assert speed.tokens_per_s == pytest.approx(5_000.0, rel=0.05)
    speed.note(FULL, FULL / 10_000.0, 60.0)
    assert speed.tokens_per_s == pytest.approx(10_000.0, rel=0.05)


def test_no_step_is_so_fast_that_computing_takes_no_time():
    """A clock may stand nearly still. Later steps say how fast computing really is."""
    speed = PrefillSpeed()
    for _ in range(4):
        speed.note(FULL, 5e-324, 0.0)
    assert speed.tokens_per_s == pytest.approx(1e9)
    for step in range(200):
        speed.note(FULL, FULL / 20_000, 100.0 + step)
    assert speed.tokens_per_s == pytest.approx(20_000, rel=0.05)


@pytest.mark.parametrize("ignored", [(0, 1.0), *((100_000, seconds) for seconds in (0.0, -1.0, math.inf, math.nan))])
def test_a_step_without_prompt_tokens_or_a_valid_duration_is_ignored(ignored):
    speed = PrefillSpeed()
    for _ in range(4):
        speed.note(*ignored, 0.0)
        speed.note(FULL, 0.1, 0.0)
    assert speed.tokens_per_s == pytest.approx(FULL / 0.1)


def test_a_step_that_hung_counts_as_one_that_was_slow():
    speed = known()
    speed.note(FULL, 60.0, 0.0)
    assert speed.tokens_per_s > 0.7 * 20_000.0


@pytest.mark.parametrize("tokens", [FULL, 16_384])
def test_a_first_step_that_compiled_is_ignored(tokens):
    speed = PrefillSpeed()
    speed.note(tokens, 60.0, 0.0)
    assert speed.tokens_per_s is None
    for _ in range(2):
        speed.note(tokens, tokens / 20_000.0, 60.0)
    assert speed.tokens_per_s == pytest.approx(20_000.0)


def explored(speed, tokens, lost_s, until_s):
    return [second for second in range(1, until_s) if speed.explores(tokens, lost_s, float(second))]


@pytest.mark.parametrize(
    ("tokens", "lost_s", "until_s", "when"),
    [
        (FULL, 0.5, 200, [50, 150]),  # After a hundred times its cost without a measurement.
        (FULL, 0.001, 4, [1, 3]),
        (FULL // 5, 0.0, 1_000, []),  # Too few tokens say nothing.
        # Computed in many steps, a prompt far longer than any never makes one of its own size: it is ever rarer.
        (10 * FULL, 100.0, 1_000, [1, 3, 7, 15, 31, 63, 127, 255, 511]),
    ],
)
def test_a_loadable_prompt_is_computed_for_a_measurement(tokens, lost_s, until_s, when):
    assert explored(known(), tokens, lost_s, until_s) == when


def test_while_prompts_are_computed_none_is_computed_for_a_measurement():
    speed = known()
    for second in range(1_000):
        speed.note(FULL, 0.1, float(second))
        assert not speed.explores(FULL, 0.5, second + 0.9)
