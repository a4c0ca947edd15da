"""The device that `DEVICE=… tests/gpu/run` names, by each way to copy; the CPU, for a dry run, if it names none."""

import copy
import os
from functools import partial

import pytest

from kvtier.kvcache.transfer.cuda import copiers_with
from kvtier.tools.selftest_checks import TorchDevice
from tests.gpu.modelled import Modelled, model


@pytest.fixture(scope="session")
def device():
    return TorchDevice(os.environ.get("KVTIER_DEVICE", "cpu"))


@pytest.fixture(params=["as transfers choose", "one by one", "modelled"])
def each_device(request, device, monkeypatch):
    if request.param == "modelled":
        model(monkeypatch)
        return Modelled()
    if request.param == "as transfers choose":
        return device
    if not device.has_streams or device.way == request.param:
        pytest.skip(f"{device.name} copies {device.way}")
    single = copy.copy(device)
    single.copiers = partial(copiers_with, device=device.place, copy=None)
    return single


@pytest.fixture
def modelled(monkeypatch):
    model(monkeypatch)
    return Modelled()
