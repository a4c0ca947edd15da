"""The suites of remote tiers on a pool of Mooncake Store."""

import os
from collections.abc import Iterator

import pytest

from tests.remote.faults import Faults
from tests.remote.mixed import Mixed
from tests.remote.mooncake import ENVIRONMENT, MooncakeRemote
from tests.remote.shared import Shared


@pytest.fixture(scope="session")
def remote(outside: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[MooncakeRemote]:
    os.environ.update(ENVIRONMENT)
    pytest.importorskip("mooncake.store", reason="a library that Mooncake needs is missing", exc_type=ImportError)
    remote = MooncakeRemote(tmp_path_factory.mktemp("mooncake"))
    yield remote
    remote.end()


class TestMooncake(Faults, Mixed, Shared):
    pass
