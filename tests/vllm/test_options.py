"""What may be written into a tier behind vLLM's own manager: its limits, and its runner's."""

import pytest

from kvtier.backend.namespace import Namespace
from kvtier.config import EngineLimits, TierLimits
from kvtier.errors import ConfigError
from kvtier.integrations.vllm.secondary import _start
from kvtier.integrations.vllm_options import (
    ENGINE_ONLY,
    SecondaryLimits,
    read_options,
    read_secondary_options,
    secondary_config,
)
from kvtier_backends.dummy import DummyBackend

NAMESPACE = Namespace(model_name="tiny")
PLACES = {"dp_rank": "1", "engine_id": "blue"}


def config_of(limits: dict):
    options = read_secondary_options({"backend": "dummy", "limits": limits})
    return secondary_config(options, NAMESPACE, PLACES, rows=8, row_bytes=8_192)


def test_limits_of_the_tier_and_of_its_runner_stand_in_one_table():
    config = config_of({"deadline_s": "2s", "heartbeat_s": "1min", "close_s": 3, "action_chunks": 16})
    assert config.secondary_tiers[0].limits == TierLimits(deadline_s=2.0)
    assert config.limits == EngineLimits(heartbeat_s=60.0, close_s=3.0, action_chunks=16)


def test_what_is_not_given_is_as_in_an_engine():
    config = config_of({})
    assert (config.secondary_tiers[0].limits, config.limits) == (TierLimits(), EngineLimits())


def test_a_relative_root_is_that_of_the_start_wherever_the_owner_goes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = read_secondary_options({"backend": "fs", "root": "here"})
    config = secondary_config(options, NAMESPACE, PLACES, rows=8, row_bytes=8_192)
    assert config.secondary_tiers[0].options["root"] == str(tmp_path / "here")


@pytest.mark.parametrize(("root", "placed"), [("kv-{dp_rank}", "kv-1"), ("{engine_id}/{dp_rank}", "blue/1")])
def test_a_root_of_each_engine_has_its_rank_or_its_name(tmp_path, root, placed):
    options = read_secondary_options({"backend": "fs", "root": f"{tmp_path}/{root}"})
    config = secondary_config(options, NAMESPACE, PLACES, rows=8, row_bytes=8_192)
    assert config.secondary_tiers[0].options["root"] == f"{tmp_path}/{placed}"


class FarAway(DummyBackend):
    locality = "REMOTE"


@pytest.mark.parametrize(("given", "locality"), [({}, "REMOTE"), ({"locality": "LOCAL"}, "LOCAL")])
def test_a_tier_is_where_its_backend_says_unless_its_options_do(given, locality):
    options = read_secondary_options({"backend": f"{__name__}:FarAway"} | given)
    config = secondary_config(options, NAMESPACE, PLACES, rows=8, row_bytes=8_192)
    assert config.secondary_tiers[0].locality == locality


class Crashing(DummyBackend):
    runner = "process"


def test_a_tier_that_needs_a_process_is_refused_where_vllms_rows_cannot_be_mapped_there():
    """As in vLLM 0.33 from 1 GiB on: a thread would be taken otherwise."""
    options = read_secondary_options({"backend": f"{__name__}:Crashing"})
    config = secondary_config(options, NAMESPACE, PLACES, rows=8, row_bytes=8_192)
    rows = memoryview(bytearray(8 * 8_192))
    message = r"^secondary_tiers\[\].backend: '\S+:Crashing' given, which needs .* use kvtier's own connector"
    with pytest.raises(ConfigError, match=message):
        _start(object(), rows, config)


@pytest.mark.parametrize("name", sorted(ENGINE_ONLY))
def test_a_limit_of_memory_that_is_vllms_is_refused(name):
    message = rf"secondary_tiers\[\]\.limits\.{name}: given, none accepted: here memory is vLLM's"
    with pytest.raises(ConfigError, match=message):
        read_secondary_options({"backend": "dummy", "limits": {name: 0.5}})


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"close": 1}, r"secondary_tiers\[\]\.limits\.close: .*close_s"),
        ({"heartbeat_s": 0}, r"secondary_tiers\[\]\.limits\.heartbeat_s: 0 given"),
        ({"action_chunks": "many"}, r"secondary_tiers\[\]\.limits\.action_chunks: 'many' given"),
        (7, r"secondary_tiers\[\]\.limits: 7 given"),
    ],
)
def test_a_bad_limit_is_named(limits, message):
    with pytest.raises(ConfigError, match=message):
        read_secondary_options({"backend": "dummy", "limits": limits})


@pytest.mark.parametrize("name", ["prefill_tokens_per_s", "late_margin"])
def test_loads_are_weighed_behind_the_first_door_alone(name):
    message = rf'^secondary_tiers\[\]\.{name}: 2 given, none accepted: here vLLM\'s own .*"KVTierOffloadingSpec" puts'
    with pytest.raises(ConfigError, match=message):
        read_secondary_options({"backend": "dummy", name: 2})


@pytest.mark.parametrize("name", ["dnsity", "no_such_module:Policy"])
def test_a_policy_that_there_is_not_is_refused_before_anything_is_allocated(name):
    message = rf"^kv_connector_extra_config\.eviction_policy: .*'{name}'(: there is no module| is no policy; did you)"
    with pytest.raises(ConfigError, match=message):
        read_options({"cpu_bytes_to_use": "1GiB", "eviction_policy": name})


def test_every_limit_is_the_tiers_or_the_engines():
    names = set(SecondaryLimits.__struct_fields__)
    assert names | ENGINE_ONLY == {*TierLimits.__struct_fields__, *EngineLimits.__struct_fields__}
