"""The fixtures of tests/engine that open whole engines."""

from tests.engine.conftest import nothing_left, open_engine, runner

__all__ = ["nothing_left", "open_engine", "runner"]
