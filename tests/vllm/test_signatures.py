"""Any version of vLLM whose names and signatures agree with those that kvtier uses; another is refused by a name."""

import json
import logging
import os
import subprocess
import sys
from dataclasses import replace

import pytest
from vllm.v1.kv_offload import base

from kvtier.integrations import vllm_plugin
from kvtier.integrations.signatures import warn_if_untried
from kvtier.integrations.vllm import OURS
from kvtier.integrations.vllm.manager import VllmManager
from kvtier.integrations.vllm.signatures import VLLM


def the_one(caplog):
    """Return the only message. An engine that ran before may have two handlers take the same record."""
    (record,) = set(caplog.records)
    return record.getMessage()


def test_this_version_fits_without_a_word(caplog):
    assert list(VLLM.differences(OURS)) == []
    warn_if_untried(replace(VLLM))
    assert caplog.messages == []


def test_an_unknown_version_that_fits_is_one_warning(caplog):
    other = replace(VLLM, version="1.0.0rc1")
    with caplog.at_level(logging.WARNING):
        warn_if_untried(other)
        warn_if_untried(other)
    assert the_one(caplog).startswith("vLLM 1.0.0rc1 has the names")


DIFFERS = {
    "a parameter more": (base.OffloadingManager, "lookup", lambda self, key, req_context, until: None, "lookup(self, "),
    "a parameter less": (base.OffloadingWorker, "wait", lambda self: None, "OffloadingWorker.wait(self) differs"),
    "another order": (base.OffloadingManager, "touch", lambda self, req_context, keys: None, "touch(self, req_context"),
    "a class that is gone": (base, "PrepareStoreOutput", None, "PrepareStoreOutput is missing"),
    "a method that is gone": (base.OffloadingManager, "has_pending_work", None, "has_pending_work is missing"),
    "a method to complete": (VllmManager, "__abstractmethods__", frozenset({"seek"}), "OffloadingManager.seek is new"),
    "a field that is gone": (base, "TierFilter", lambda kinds: None, "TierFilter(kinds) differs from the known (match"),
}


@pytest.mark.parametrize("what", DIFFERS)
def test_a_vllm_that_differs_is_known_by_the_name(monkeypatch, what):
    owner, name, value, told = DIFFERS[what]
    if value is None:
        monkeypatch.delattr(owner, name)
    else:
        monkeypatch.setattr(owner, name, value)
    (difference,) = VLLM.differences(OURS)
    assert told in difference
    assert str(VLLM.refusal(difference)).startswith("kvtier does not fit vLLM ")


def test_a_plug_in_in_a_vllm_without_these_factories_registers_nothing_and_warns(monkeypatch, caplog):
    monkeypatch.setattr(vllm_plugin, "NAMES", (*vllm_plugin.NAMES[:1], ("no_such_module", "A.b", "c", "d")))
    vllm_plugin.register()
    assert the_one(caplog).startswith("kvtier registers nothing with this vLLM")


def test_the_plug_in_loads_neither_torch_nor_the_engine():
    """In a process of its own, with factories that stand in for vLLM's."""
    program = """
import json, sys, types
from kvtier.integrations import vllm_plugin
registered = []
for module, path, _, _ in vllm_plugin.NAMES:
    factory, _, method = path.partition(".")
    stand_in = type(factory, (), {method: staticmethod(lambda *given: registered.append(given))})
    sys.modules[f"vllm.{module}"] = types.SimpleNamespace(**{factory: stand_in})
vllm_plugin.register()
loaded = {"torch", "vllm", "kvtier.engine", "kvtier_backends"} & set(sys.modules)
print(json.dumps([sorted(loaded), registered]))
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    ran = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    loaded, registered = json.loads(ran.stdout)
    assert loaded == []
    assert [name for name, *_ in registered] == [
        "KVTierConnector",
        "KVTierOffloadingSpec",
        "kvtier",
        "KVTierSecondaryTier",
    ]
    assert {package for _, package, _ in registered} == {"kvtier.integrations.vllm"}
