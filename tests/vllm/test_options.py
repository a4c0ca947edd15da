"""Options of a tier behind vLLM's own manager: its limits, and its runner's; and what the first door refuses."""

import pytest

from kvtier.backend.namespace import Namespace
from kvtier.config import EngineLimits, TierLimits
from kvtier.errors import ConfigError
from kvtier.integrations.vllm.secondary import _start
from kvtier.integrations.vllm_options import read_options, read_secondary_options, secondary_config
from kvtier_backends.dummy import DummyBackend

PLACES = {"dp_rank": "1", "engine_id": "blue"}


def config_of(**given):
    options = read_secondary_options({"backend": "dummy"} | given)
    return secondary_config(options, Namespace(model_name="tiny"), PLACES, rows=8, row_bytes=8_192)


def test_limits_of_the_tier_and_of_its_runner_stand_in_one_table():
    config = config_of(limits={"deadline_s": "2s", "close_s": 3, "action_chunks": 16})
    assert config.secondary_tiers[0].limits == TierLimits(deadline_s=2.0)
    assert config.limits == EngineLimits(close_s=3.0, action_chunks=16)
    config = config_of()
    assert (config.secondary_tiers[0].limits, config.limits) == (TierLimits(), EngineLimits())


@pytest.mark.parametrize(
    ("root", "placed"), [("a", "a"), ("kv-{dp_rank}", "kv-1"), ("{engine_id}/{dp_rank}", "blue/1")]
)
def test_a_root_is_that_of_the_start_and_of_each_engine(tmp_path, monkeypatch, root, placed):
    monkeypatch.chdir(tmp_path)
    assert config_of(backend="fs", root=root).secondary_tiers[0].options["root"] == str(tmp_path / placed)


class FarAway(DummyBackend):
    locality = "REMOTE"


class Crashing(DummyBackend):
    runner = "process"


@pytest.mark.parametrize(("given", "locality"), [({}, "REMOTE"), ({"locality": "LOCAL"}, "LOCAL")])
def test_a_tier_is_where_its_backend_says_unless_its_options_do(given, locality):
    assert config_of(backend=f"{__name__}:FarAway", **given).secondary_tiers[0].locality == locality


def test_a_tier_that_needs_a_process_is_refused_where_vllms_rows_cannot_be_mapped_there():
    """As in vLLM 0.33 from 1 GiB on: a thread would be taken otherwise."""
    message = r"^secondary_tiers\[\].backend: '\S+:Crashing' given, which needs .* use kvtier's own connector"
    with pytest.raises(ConfigError, match=message):
        _start(object(), memoryview(bytearray(8 * 8_192)), config_of(backend=f"{__name__}:Crashing"))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"limits": {"close": 1}}, r"limits\.close: .*close_s"),
        ({"limits": {"action_chunks": "many"}}, r"limits\.action_chunks: 'many' given"),
        ({"limits": {"lease_s": 0.5}}, r"limits\.lease_s: no such field"),  # Memory is vLLM's.
        ({"limits": 7}, r"limits: 7 given"),
        ({"cascade": "evict"}, r"cascade: no such field"),  # vLLM's own manager decides about stores and loads.
        ({"prefill_tokens_per_s": 2}, r"prefill_tokens_per_s: no such field"),
    ],
)
def test_an_option_that_a_tier_behind_vllms_manager_lacks_is_named(tmp_path, given, message):
    with pytest.raises(ConfigError, match=rf"^secondary_tiers\[\]\.{message}"):
        config_of(**{"backend": "fs", "root": str(tmp_path)} | given)


@pytest.mark.parametrize("name", ["dnsity", "no_such_module:Policy"])
def test_a_policy_that_there_is_not_is_refused_before_anything_is_allocated(name):
    message = rf"^kv_connector_extra_config\.eviction_policy: .*'{name}'(: there is no module| is no policy; did you)"
    with pytest.raises(ConfigError, match=message):
        read_options({"cpu_bytes_to_use": "1GiB", "eviction_policy": name})
