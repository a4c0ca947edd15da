"""The device that `make test-gpu DEVICE=…` names; the CPU, for a dry run, where it names none."""

import os

import pytest

from kvtier.tools.selftest.device import Device, device_named
from tests.gpu.modelled import Modelled, model


@pytest.fixture(scope="session")
def device(outside: None) -> Device:
    return device_named(os.environ.get("KVTIER_DEVICE", "cpu"))


@pytest.fixture
def modelled(monkeypatch: pytest.MonkeyPatch) -> Modelled:
    model(monkeypatch)
    return Modelled()
