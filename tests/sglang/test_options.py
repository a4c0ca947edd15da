"""A bad configuration or version is refused before anything is allocated; methods take what SGLang passes."""

import importlib
import inspect
import re
from dataclasses import replace

import pytest
from sglang.srt.mem_cache import hicache_storage
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage

from kvtier.errors import ConfigError
from kvtier.integrations import sglang
from kvtier.integrations.sglang import KVTierStorage
from kvtier.integrations.sglang.options import read_options
from kvtier.integrations.sglang.signatures import SGLANG
from kvtier.integrations.signatures import warn_if_untried

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


def test_an_sglang_that_was_never_tried_and_fits_is_one_warning(caplog):
    assert list(SGLANG.differences([KVTierStorage])) == []
    warn_if_untried(SGLANG)
    assert caplog.messages == []
    other = replace(SGLANG, version="0.5.222")
    warn_if_untried(other)
    warn_if_untried(other)
    assert [message.split(" has the names")[0] for message in caplog.messages] == ["SGLang 0.5.222"]


DIFFERS = {
    "a parameter more": (HiCacheStorage, "exists", lambda self, key, until: None, "exists(self, key, until) differs"),
    "another order": (HiCacheStorage, "batch_set_v1", lambda self, host_indices, keys: None, "v1(self, host_indices"),
    "a method that is gone": (HiCacheStorage, "batch_get_v2", None, "HiCacheStorage.batch_get_v2 is missing"),
    "a method to complete": (KVTierStorage, "__abstractmethods__", frozenset({"seek"}), "HiCacheStorage.seek is new"),
    "a class that is gone": (hicache_storage, "PoolTransfer", None, "PoolTransfer is missing"),
    "a field that is gone": (hicache_storage, "PoolTransfer", lambda keys: None, "PoolTransfer(keys) differs from"),
}


@pytest.mark.parametrize("what", DIFFERS)
def test_an_sglang_that_differs_is_refused_by_the_name(monkeypatch, what):
    owner, name, value, told = DIFFERS[what]
    if value is None:
        monkeypatch.delattr(owner, name)
    else:
        monkeypatch.setattr(owner, name, value)
    with pytest.raises(ConfigError, match=re.escape(told)) as refused:
        importlib.reload(sglang)
    assert str(refused.value).startswith(f"kvtier does not fit SGLang {SGLANG.version}: ")


def test_each_method_has_the_parameters_of_the_sglang_that_is_here_and_none_is_abstract():
    theirs, ours = (
        {name: list(inspect.signature(getattr(kind, name)).parameters) for name in CALLS}
        for kind in (HiCacheStorage, KVTierStorage)
    )
    assert ours == theirs
    assert not KVTierStorage.__abstractmethods__
