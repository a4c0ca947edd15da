import importlib.util
import os
import re
import subprocess
import sys

import pytest

from kvtier.backend import ConfigError
from kvtier.config import EngineConfig, settled
from kvtier.testing.conformance import tier_context
from kvtier_backends.mooncake import MooncakeBackend, MooncakeOptions
from kvtier_backends.mooncake.client import environment

OPENS = """
import asyncio
from kvtier.testing.conformance import tier_context
from kvtier_backends.mooncake import MooncakeBackend, MooncakeOptions
try:
    asyncio.run(MooncakeBackend.open(MooncakeOptions(master="127.0.0.1:1"), tier_context(4_096)))
except Exception as error:
    print(type(error).__name__, error)
"""


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"master": "localhost"}, "master: 'localhost' given, 'host:port' accepted"),
        ({"master": ":50051"}, "master: ':50051' given"),
        ({"master": "host:0"}, "master: 'host:0' given"),
        ({"master": "http://host:1"}, "master: 'http://host:1' given"),
        ({"protocol": "ip"}, "protocol: 'ip' given"),
        ({"devices": ("mlx5_0",)}, "devices: no use with protocol = 'tcp'"),
        ({"replicas": 0}, "replicas: 0 given"),
        ({"prefix": "with space/"}, "prefix: 'with space/' given"),
        ({"seal": "aes-256-gcm"}, "seal: 'aes-256-gcm' given, which needs either"),
    ],
)
def test_options_that_cannot_be_used_are_refused_by_name(options, told):
    with pytest.raises(ConfigError, match=re.escape(told)):
        MooncakeOptions(**options)


def test_mooncakes_own_time_outs_follow_ours():
    assert environment(MooncakeOptions(timeout_s=2.5, local_host="10.0.0.1")) == {
        "MC_TCP_STATUS_TIMEOUT_SEC": "2",
        "MC_TCP_PROGRESS_TIMEOUT_SEC": "2",
        "MC_RPC_TIMEOUT_MS": "2500",
        "MC_RPC_CONNECT_TIMEOUT_MS": "1000",
        "MC_STORE_CLIENT_SETUP_RETRIES": "1",
        "MC_TCP_BIND_ADDRESS": "10.0.0.1",
    }
    assert environment(MooncakeOptions(timeout_s=0.25))["MC_TCP_STATUS_TIMEOUT_SEC"] == "1"


def test_only_the_runners_own_process_is_accepted():
    config = {"cpu_bytes_to_use": "1MiB", "chunk_bytes": 4_096, "secondary_tiers": [{"type": "mooncake"}]}
    told = "runner: 'inline' given, 'process' accepted with secondary_tiers[0] of type 'mooncake'"
    with pytest.raises(ConfigError, match=re.escape(told)):
        settled(EngineConfig.from_dict({**config, "runner": "inline"}))
    (tier,) = settled(EngineConfig.from_dict({**config, "runner": "process"})).secondary_tiers
    assert tier.locality == "REMOTE"


async def test_staging_that_holds_no_chunk_is_refused_by_name():
    options = MooncakeOptions(staging_bytes=2 * 4_096)
    with pytest.raises(ConfigError, match="staging_bytes: 8,192 bytes given, at least 8,448 accepted"):
        await MooncakeBackend.open(options, tier_context(4_096))


@pytest.mark.skipif(importlib.util.find_spec("mooncake") is not None, reason="it is installed here")
async def test_a_missing_package_is_reported_by_name():
    with pytest.raises(ConfigError, match=r"mooncake-transfer-engine-non-cuda: pip install 'kvtier\[mooncake\]'"):
        await MooncakeBackend.open(MooncakeOptions(), tier_context(4_096))


@pytest.mark.skipif(importlib.util.find_spec("mooncake") is None, reason="it is not installed here")
def test_a_missing_system_library_is_reported_with_its_package(outside):
    without = {name: value for name, value in os.environ.items() if name != "LD_LIBRARY_PATH"}
    out = subprocess.run([sys.executable, "-c", OPENS], env=without, capture_output=True, text=True, check=True).stdout
    if out.startswith("BackendUnavailable"):
        pytest.skip("the system has them all")
    assert re.match(r"ConfigError type: 'mooncake': .* lib\S+: cannot open shared object .* libibverbs1, libnuma1", out)
