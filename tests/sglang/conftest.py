"""Tests with SGLang's own host pools, hashing and controller on the CPU, run by `make test-sglang`; no forward pass."""

from importlib.util import find_spec

import pytest

from tests.fs.conftest import mount
from tests.sglang.stubs import install

__all__ = ["mount"]

WITHOUT_SGLANG = find_spec("sglang") is None
if WITHOUT_SGLANG:
    collect_ignore_glob = ["test_*.py"]
else:
    install()


def pytest_report_header():
    return ["tests/sglang is left out: SGLang is not here (make test-sglang has it)"] if WITHOUT_SGLANG else []


@pytest.fixture
def doors(tmp_path):
    from tests.sglang.doors import Doors

    with Doors(tmp_path / "tier") as doors:
        yield doors
