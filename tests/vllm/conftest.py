"""Tests in the real engine: vLLM's CPU build, tiny random models, no network; run by `make test-vllm`."""

import os
import warnings
from importlib.util import find_spec
from pathlib import Path

import pytest

HERE = Path(__file__).parent
WITHOUT_VLLM = find_spec("vllm") is None
if WITHOUT_VLLM:
    collect_ignore_glob = ["test_*.py"]
else:
    os.environ.update(  # Read when vLLM is imported.
        VLLM_ENABLE_V1_MULTIPROCESSING="0",  # The engine core in this process; workers beyond the first have their own.
        VLLM_CPU_KVCACHE_SPACE="1",
        VLLM_CPU_OMP_THREADS_BIND="nobind",
        VLLM_LOGGING_LEVEL="WARNING",
        HF_HUB_OFFLINE="1",
        OMP_NUM_THREADS="1",
        TOKENIZERS_PARALLELISM="false",
    )


def pytest_configure(config):
    """Import vLLM, unless other processes run the tests."""
    if not WITHOUT_VLLM and not getattr(config.option, "numprocesses", None):
        with warnings.catch_warnings(action="ignore"):  # What vLLM imports warns of itself; warnings are errors here.
            from tests.vllm.engines import start_fork_server

            start_fork_server()


def pytest_report_header():
    return ["tests/vllm is left out: vLLM is not installed here (make test-vllm has it)"] if WITHOUT_VLLM else []


def pytest_collection_modifyitems(items):
    for item in items:
        if HERE in item.path.parents:  # vLLM and what it imports warn of themselves.
            item.add_marker(pytest.mark.filterwarnings("ignore"))


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="session")
def llama(checkpoints):
    from tests.vllm.models import llama

    return llama(checkpoints)


@pytest.fixture(scope="session")
def peer():
    from tests.vllm.peer import Peer

    peer = Peer()
    yield peer
    peer.end()


@pytest.fixture
def disk(tmp_path):
    return tmp_path / "tier"


@pytest.fixture(autouse=True)
def nothing_is_left():
    """Whatever a test starts is gone when it ends: shared memory, runners' processes."""
    from tests.vllm.leftovers import leftovers, wait_until_gone

    before = leftovers()
    yield
    assert wait_until_gone(before) == set()
