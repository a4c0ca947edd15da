"""Prometheus and promtool, for the tests that ask them: those of KVTIER_PROMETHEUS, a folder, or installed ones."""

import os
import shutil

import pytest


@pytest.fixture(scope="session")
def programs(outside):
    folder = os.environ.get("KVTIER_PROMETHEUS", "")
    found = [shutil.which(name, path=folder) or shutil.which(name) for name in ("prometheus", "promtool")]
    if None in found:
        pytest.skip("Prometheus is not here: tests/monitoring/run unpacks Debian's")
    prometheus, promtool = (str(path) for path in found)
    return prometheus, promtool
