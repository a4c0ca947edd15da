"""Whole engines, as the tests of engines open them."""

from tests.engine.conftest import nothing_left, open_engine, runner

__all__ = ["nothing_left", "open_engine", "runner"]
