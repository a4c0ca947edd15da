"""Fixtures of the simulation's tests."""

import logging

import pytest


@pytest.fixture(autouse=True)
def quiet(caplog):
    """Keep the faults that a seed asks for out of the log."""
    for name in ("kvtier", "kvtier_backends"):
        caplog.set_level(logging.CRITICAL, name)
