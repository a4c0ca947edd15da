"""The circuit breaker of a tier: what may be sent to it after it has failed."""

from enum import Enum


class BreakerState(Enum):
    CLOSED = "closed"  # The tier is used.
    OPEN = "open"  # It failed too often: not used until the cool-down is over.
    HALF_OPEN = "half_open"  # A few chunks are let through: their outcome decides.


CLOSED, OPEN, HALF_OPEN = BreakerState.CLOSED, BreakerState.OPEN, BreakerState.HALF_OPEN
ALL = 1 << 32  # Chunks: as many as there can be.


class Breaker:
    """Keeps kvtier from asking a tier that only fails; pure, with the time as an argument.

    Closed → open after `failures_max` failed transfers in a row; open → half-open after `cooldown_s` seconds; then
    `trial_chunks` chunks may pass, and the first outcome closes or opens it again. A trial without any outcome within
    another `cooldown_s` is renewed, since what was let through may never have been sent. As many keys may be asked for
    in a trial; that a tier answers does not close it, for a disk that cannot be read may well be listed.
    """

    def __init__(self, failures_max: int, cooldown_s: float, trial_chunks: int) -> None:
        self.state = CLOSED
        self.opened = 0  # How often it opened.
        self.failures = 0  # In a row.
        self._failures_max = failures_max
        self._cooldown_s = cooldown_s
        self._trial_chunks = trial_chunks
        self._until = 0.0
        self._trial_left = 0
        self._asks_left = 0

    def admits(self, now: float) -> int:
        """Return how many chunks may be sent now; whoever sends some calls `take`."""
        if self.state is CLOSED:
            return ALL
        if now >= self._until:
            self.state = HALF_OPEN
            self._trial_left = self._asks_left = self._trial_chunks
            self._until = now + self._cooldown_s
        return self._trial_left if self.state is HALF_OPEN else 0

    def take(self, chunks: int = 1) -> None:
        """Count chunks that are sent against the trial, if there is one."""
        if self.state is HALF_OPEN:
            self._trial_left = max(0, self._trial_left - chunks)

    def admits_asking(self) -> bool:
        """Say whether a tier that admits chunks may be asked for one more key; whoever asks calls `ask`."""
        return self.state is not HALF_OPEN or self._asks_left > 0

    def ask(self) -> None:
        """Count a key that is asked for against the trial, if there is one."""
        if self.state is HALF_OPEN:
            self._asks_left -= 1

    def succeeded(self) -> None:
        self.state = CLOSED
        self.failures = 0

    def trip(self, now: float) -> None:
        """Open at once: the tier did not even come back in time for a reset."""
        self.opened += self.state is not OPEN
        self.state = OPEN
        self._until = now + self._cooldown_s

    def failed(self, now: float) -> None:
        self.failures += 1
        if self.state is HALF_OPEN or (self.state is CLOSED and self.failures >= self._failures_max):
            self.trip(now)
