"""The suites of remote tiers on a bucket."""

from collections.abc import Iterator

import pytest

from tests.remote.faults import Faults
from tests.remote.mixed import Mixed
from tests.remote.object import ObjectRemote
from tests.remote.shared import Shared


@pytest.fixture(scope="session")
def remote(outside: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectRemote]:
    remote = ObjectRemote(tmp_path_factory.mktemp("object"))
    with pytest.MonkeyPatch.context() as environment:  # Runners and owners have it from here.
        environment.setenv("AWS_ACCESS_KEY_ID", remote.server.access_key)
        environment.setenv("AWS_SECRET_ACCESS_KEY", remote.server.secret_key)
        yield remote
    remote.end()


class TestObject(Faults, Mixed, Shared):
    pass
