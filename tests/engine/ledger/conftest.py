import pytest

from tests.engine.ledger.bench import Bench


@pytest.fixture
def bench():
    return Bench


@pytest.fixture
def engine():
    return Bench()
