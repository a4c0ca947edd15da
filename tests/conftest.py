"""What every test stands on: readable assertions, Hypothesis profiles, and a mark for tests in virtual time."""

import asyncio
import os
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, settings

pytest.register_assert_rewrite("kvtier.testing")

from kvtier.testing.virtual_time import VirtualTimeLoop  # noqa: E402  # After its assertions are registered.

# A deadline would time the machine rather than the code (others build on it); seeds that failed are kept by name.
settings.register_profile("dev", max_examples=25, deadline=None)
settings.register_profile("ci", max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("nightly", parent=settings.get_profile("ci"), max_examples=5_000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "dev"))


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "virtual_time: run the test on a VirtualTimeLoop, where sleeping takes no time.")


def pytest_asyncio_loop_factories(item: pytest.Item) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    if item.get_closest_marker("virtual_time"):
        return {"virtual": VirtualTimeLoop}
    return {"real": asyncio.new_event_loop}
