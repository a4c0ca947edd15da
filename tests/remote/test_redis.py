"""The suites of remote tiers on Redis."""

from collections.abc import Iterator

import pytest

from tests.remote.faults import Faults
from tests.remote.mixed import Mixed
from tests.remote.redis import RedisRemote
from tests.remote.shared import Shared


@pytest.fixture(scope="session")
def remote(outside: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisRemote]:
    remote = RedisRemote(tmp_path_factory.mktemp("redis"))
    yield remote
    remote.end()


class TestRedis(Faults, Mixed, Shared):
    pass
