"""The prefill speed: how many tokens of prompts the LLM engine computes in a second, configured or learned.

Steps that mostly decode take their time for other tokens than a prompt's. They compute few of a prompt, so only steps
that compute many count: those of a quarter of the step in which the average token was computed.
"""

import math

HALF_LIFE_TOKENS = 500_000  # Half a minute of one busy GPU: the speed is its own and the model's, and changes slowly.
TOKENS_MIN = 4_096  # Noted before anything is concluded: the first steps compile, or warm up.
FULL_STEP_SHARE = 0.25  # Of the step in which the average token was computed; less of it is mostly decoding.


class PrefillSpeed:
    """Tokens a second: what was configured, or else the decayed average of what was noted."""

    def __init__(self, tokens_per_s: float | None = None) -> None:
        self.tokens_per_s = tokens_per_s
        """None: not known."""
        self._configured = tokens_per_s is not None
        self._noted = 0.0  # Tokens, decayed.
        self._squares = 0.0  # Of the tokens of a step.
        self._tokens = 0.0  # Of full steps.
        self._seconds = 0.0

    def note(self, tokens: int, seconds: float) -> None:
        """Take note of a step that computed so many tokens of prompts; one of none, or of no time, says nothing."""
        if self._configured or tokens <= 0 or not 0.0 < seconds < math.inf:
            return
        left = 0.5 ** (tokens / HALF_LIFE_TOKENS)
        self._noted = self._noted * left + tokens
        self._squares = self._squares * left + tokens * tokens
        if tokens < FULL_STEP_SHARE * self._squares / self._noted:
            return
        self._tokens = self._tokens * left + tokens
        self._seconds = self._seconds * left + seconds
        if self.tokens_per_s is not None or self._noted >= TOKENS_MIN:
            self.tokens_per_s = self._tokens / self._seconds
