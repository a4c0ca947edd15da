"""Turns of the loop: whatever an engine does in one of them, no other task waits for long.

Virtual time does not move in a turn, so a turn is measured by the thread's own processor time. That is the same on a
busy machine. A turn of these small engines takes some 3 ms, audits and checks included. The garbage collector could
take ten times as much, and does not run meanwhile. What goes round in short turns is seen by their number, while time
stands still.
"""

import asyncio
import gc
import math
import time

from kvtier.testing.virtual_time import VirtualTimeLoop

TURN_S_MAX = 0.05
TURNS_AT_ONE_MOMENT_MAX = 5_000  # Seeds take up to some hundred; tasks that wake each other for ever take any number.


class LongTurn(AssertionError):
    """A turn took too long. On a machine that other guests share it may be theirs: it counts if it happens again."""


class TurningLoop(VirtualTimeLoop):
    """A loop in virtual time that knows if one of its turns took too long."""

    def __init__(self):
        super().__init__(iterations_at_one_moment_max=TURNS_AT_ONE_MOMENT_MAX)
        self.turns = 0
        self.complaint = ""
        """What the first turn that took too long has to say; empty if none did."""
        self._begun_s = math.inf

    def run_forever(self):
        """Run as any loop does, without the garbage collector."""
        self._begun_s = math.inf
        collects = gc.isenabled()
        gc.disable()
        try:
            super().run_forever()
        finally:
            if collects:
                gc.enable()

    def select(self, timeout):
        self.complain()
        self.turns += 1
        events = super().select(timeout)
        self._begun_s = time.thread_time()
        return events

    def complain(self):
        took_s = time.thread_time() - self._begun_s
        if took_s <= TURN_S_MAX:
            return ""
        self._begun_s += took_s
        complaint = f"other tasks have waited {took_s * 1_000:.0f} ms for the loop to turn"
        self.complaint = self.complaint or complaint
        return complaint


def check_turn():
    """Raise `LongTurn` if a turn of this loop has taken too long already: what spins ends none."""
    loop = asyncio.get_running_loop()
    if isinstance(loop, TurningLoop):
        complaint = loop.complain()
        if complaint:
            raise LongTurn(complaint)
