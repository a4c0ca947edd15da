"""A bad configuration or version is refused before anything is allocated; methods take what SGLang passes."""

import inspect
import re

import pytest
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage

from kvtier.errors import ConfigError
from kvtier.integrations.sglang import KNOWN_VERSIONS, KVTierStorage, require_known_version
from kvtier.integrations.sglang.options import read_options

TIER = {"type": "dummy"}
CALLS = [name for name, member in vars(HiCacheStorage).items() if inspect.isfunction(member) and name[0] != "_"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"interface_v1": None}, "interface_v1: None given, 1 accepted"),
        ({"kvtier": {}}, "kvtier.secondary_tiers: missing"),
        ({"kvtier": {"secondary_tiers": []}}, "kvtier.secondary_tiers: no tier given"),
        ({"kvtier": {"secondary_tiers": [TIER], "deadline": 1}}, "kvtier.deadline: no such field"),
        (
            {"kvtier": {"secondary_tiers": [TIER | {"cascade": "evict"}]}},
            "kvtier.secondary_tiers[0].cascade: 'evict' given, 'store' accepted",
        ),
    ],
)
def test_a_bad_option_is_named_with_its_path(given, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        read_options({"interface_v1": 1, "kvtier": {"secondary_tiers": [TIER]}} | given)


def test_an_unknown_sglang_is_refused_in_one_sentence():
    assert [require_known_version(version) for version in KNOWN_VERSIONS] == list(KNOWN_VERSIONS)
    with pytest.raises(ConfigError, match=r"and this is SGLang 0\.6\.0: install one of these"):
        require_known_version("0.6.0")


def test_each_method_has_the_parameters_of_the_sglang_that_is_here_and_none_is_abstract():
    theirs, ours = (
        {name: list(inspect.signature(getattr(kind, name)).parameters) for name in CALLS}
        for kind in (HiCacheStorage, KVTierStorage)
    )
    assert ours == theirs
    assert not KVTierStorage.__abstractmethods__
