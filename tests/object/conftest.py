"""A server for all tests of a run, each with a bucket of its own; servers and proxies for tests that break them."""

import os
import uuid
from contextlib import suppress
from functools import partial
from importlib.util import find_spec

import pytest

from kvtier_backends.object import ObjectBackend
from tests.own import until_end
from tests.remote.servers import PATIENCE_S
from tests.remote.tiers import lender, proxy
from tests.testing.suites import open_with

__all__ = ["lender", "open_with", "proxy"]

WITHOUT_MOTO = find_spec("moto") is None
collect_ignore_glob = ["test_[!o]*.py"] if WITHOUT_MOTO else []  # All but test_options.py.

QUICK = {"timeout_s": 2.0}  # These tests wait for the time-outs.
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "kvtier-test", "AWS_SECRET_ACCESS_KEY": "kvtier-test-secret"}


def pytest_report_header():
    told = "tests/object is left out, but for its options: moto is not installed here (tests/remote/run has it)"
    return [told] if WITHOUT_MOTO else []


@pytest.fixture(scope="session")
def server(outside, tmp_path_factory):
    from tests.object.servers import MotoServer, S3Server

    if (given := S3Server.outside()) is not None:
        yield given
        return
    server = MotoServer(tmp_path_factory.mktemp("moto"), CREDENTIALS).start()
    yield server
    server.kill()


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """Keep only the tests' own credentials in the environment, unless it names the server, too."""
    if "KVTIER_S3_ENDPOINT" not in os.environ:
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            monkeypatch.delenv(name)
        for name, value in CREDENTIALS.items():
            monkeypatch.setenv(name, value)


@pytest.fixture
def own_server(request, outside, tmp_path):
    from tests.object.servers import MotoServer

    return lambda **fields: until_end(request, own := MotoServer(tmp_path, CREDENTIALS, **fields), own.kill).start()


@pytest.fixture
def bucket(server):
    bucket = f"kvtier-{uuid.uuid4().hex}"
    server.client.create_bucket(Bucket=bucket)
    yield bucket
    with suppress(server.client.exceptions.NoSuchBucket):
        server.remove_bucket(bucket)


@pytest.fixture
def opened(server, bucket, open_with):
    async def opened(*, prefix="kv", **fields):
        given = {"url": f"s3://{bucket}/{prefix}", "endpoint": server.endpoint, **fields}
        return await open_with(ObjectBackend, **given)

    return opened


@pytest.fixture
def open_tier(opened):
    return partial(opened, timeout_s=PATIENCE_S)


@pytest.fixture
def open_by_proxy(opened, proxy):
    """Open tiers without an index: every look-up is a request."""
    return partial(opened, endpoint=f"http://{proxy.address}", index_chunks=0, absent_ttl_s=0, **QUICK)


@pytest.fixture
def stored(server, bucket):
    from tests.remote.object import Objects

    return Objects(server, bucket)
