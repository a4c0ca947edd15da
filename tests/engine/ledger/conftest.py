import pytest

from tests.engine.ledger.bench import Bench


@pytest.fixture
def bench():
    """A ledger with tiers that the test itself plays; see `Bench`."""
    return Bench
