"""The real traces, as the tests of replays find them."""

from tests.tools.replay.conftest import traces

__all__ = ["traces"]
