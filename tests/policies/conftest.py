import pytest

from kvtier.policies import policy_class


@pytest.fixture(params=["arc", "density", "fifo", "lru", "s3fifo"])
def policy_type(request):
    return policy_class(request.param)
