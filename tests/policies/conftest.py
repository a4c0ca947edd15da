"""Every built-in policy, one after the other."""

from typing import Any

import pytest

from kvtier.policies import Policy, policy_class


@pytest.fixture(params=["arc", "density", "fifo", "lru", "s3fifo"])
def policy_type(request: pytest.FixtureRequest) -> type[Policy[Any]]:
    return policy_class(request.param)
