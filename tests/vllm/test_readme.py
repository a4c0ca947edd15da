"""The README's lines that start a server, run as a reader copies them; what servers keep and say when they end."""

import json
import runpy
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.docs import readme
from tests.remote.servers import ServerProcess, free_port
from tests.vllm.leftovers import leftovers, wait_until_gone
from tests.vllm.test_examples import EXAMPLES, environment_in, with_one_import

TIER = '"capacity_bytes": "100G"'
UNTRIED = "vllm.__version__ = '0.99.0'"
DIFFERS = "from vllm.v1.kv_offload.base import OffloadingManager as M; M.touch = lambda self, keys, when: None"
WARNED = "--shutdown-timeout is 0"
HOST_MEMORY = '"cpu_bytes_to_use": "8G"'
LESS_MEMORY = '"cpu_bytes_to_use": "64M"'
# What a tiny model on a CPU wants besides, and what tells of hits. Blocks are for one prompt and a half.
BESIDES = "--host 127.0.0.1 --port {port} --block-size 32 --num-gpu-blocks-override 48 --max-model-len 1280"
BESIDES += " --enforce-eager --enable-prompt-tokens-details"
PROMPT = " ".join(f"w{number * 7919 % 1_000}" for number in range(1_000))
OTHER = " ".join(f"w{number * 7919 % 1_000}" for number in range(1, 1_001))
PROMPT_HITS = 992  # Every whole block of it.
ITS_OWN = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
JSON = {"Content-Type": "application/json"}
IN_THIS_PROCESS = "VLLM_ENABLE_V1_MULTIPROCESSING"  # Set for the tests; a reader's server has its engine in another.


class Server(NamedTuple):
    address: str
    model: Path
    disk: Path
    log: Path
    process: ServerProcess
    before: set[str]
    """Runners and shared memory that existed before it started."""


class Ended(NamedTuple):
    """A server that answered the prompt and got SIGTERM. With vLLM's defaults it then kills its engine at once."""

    text: str
    cached: int
    log: str
    left: set[str]
    written: set[tuple[Path, int]]
    """Checkpoints, which the runner writes when it closes the tier: it outlives the engine."""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("readme")
    runpy.run_path(str(EXAMPLES / "vllm_tiny_model.py"))["save_tiny_model"](folder / "model")
    with served(folder, "first", readme.serve(), environment_in(folder)) as server:
        yield server


@pytest.fixture(scope="module")
def ended(server):
    """The first server's end, and that of another one over its directory, with `evict` and a vLLM of the future."""
    first, folder = told_to_end(server), server.disk.parent
    lines = readme.serve().replace(TIER, f'{TIER}, "cascade": "evict"')
    with served(folder, "second", lines, environment_in(folder) | with_one_import(folder, UNTRIED)) as server:
        return first, told_to_end(server)


def test_a_hint_in_the_body_of_a_request_reaches_kvtier(server):
    """What cannot be read does not fail the request, whatever JSON it is."""
    names = ("hints_ignored", "tier_skipped", "tier_stored")
    before = [counted(server.address, f"kvtier_{name}_total") for name in names]
    (text, _) = asked(server, OTHER, '{"kvtier": {"no_store": true, "class": "agent"}}')
    unread = ['"over"', "[]", "7", '{"over": "yes"}', '{"returns_in_s": NaN}', '{"returns_in_s": 1e999}', '{"a": {}}']
    for hint in unread:
        assert asked(server, OTHER, f'{{"kvtier": {hint}}}')[0] == text, hint
    assert asked(server, OTHER)[0] == text
    after = [counted(server.address, f"kvtier_{name}_total") for name in names]
    assert [late - early for early, late in zip(before, after, strict=True)] == [len(unread), PROMPT_HITS // 32, 0]


def test_three_lines_start_a_server_that_finds_on_disk_what_the_one_before_computed(ended):
    first, second = ended
    assert (first.cached, second.cached) == (0, PROMPT_HITS)
    assert first.text == second.text


def test_a_server_that_is_told_to_end_keeps_its_checkpoint_and_says_first_what_it_may_lose(ended):
    for each, may_lose in zip(ended, (False, True), strict=True):
        assert (each.left, bool(each.written), WARNED in each.log) == (set(), True, may_lose)


def test_a_server_of_a_version_that_was_never_tried_warns_once_and_works(ended):
    said = "vLLM 0.99.0 has the names and signatures that kvtier uses, but kvtier was tried with"
    assert [each.log.count(said) for each in ended] == [0, 1]


def test_a_server_of_a_vllm_that_differs_does_not_start_and_names_the_signature(server, tmp_path):
    folder, environment = server.disk.parent, environment_in(tmp_path) | with_one_import(tmp_path, DIFFERS)
    with pytest.raises(AssertionError), served(folder, "third", readme.serve(), environment):
        pass
    assert "OffloadingManager.touch(self, keys, when) differs" in (folder / "third.log").read_text()


@contextmanager
def served(folder, name, lines, environment):
    model, disk, log, port = folder / "model", folder / "tier", folder / f"{name}.log", free_port()
    for written, here in ((readme.MODEL, str(model)), (readme.DIRECTORY, str(disk)), (HOST_MEMORY, LESS_MEMORY)):
        assert lines.count(written) == 1
        lines = lines.replace(written, here)
    command = ["env", f"--unset={IN_THIS_PROCESS}", "bash", "-c", f"exec {lines} {BESIDES.format(port=port)}"]
    before, process = leftovers(), ServerProcess(command, log, environment | ITS_OWN)
    server = Server(f"http://127.0.0.1:{port}", model, disk, log, process, before)
    try:
        while not healthy(server.address):
            process.check()
            time.sleep(0.1)
        yield server
        process.stop()
    finally:
        process.kill()


def told_to_end(server):
    known = checkpoints(server.disk)
    text, cached = asked(server)
    server.process.stop()
    left = wait_until_gone(server.before)
    return Ended(text, cached, server.log.read_text(), left, checkpoints(server.disk) - known)


def checkpoints(disk):
    return {(path, path.stat().st_mtime_ns) for path in disk.rglob("index*")}


def healthy(address):
    try:
        with urllib.request.urlopen(f"{address}/health"):
            return True
    except (urllib.error.URLError, ConnectionError):
        return False


def asked(server, prompt=PROMPT, params=None, **headers):
    body = json.dumps({"model": str(server.model), "prompt": prompt, "max_tokens": 8, "temperature": 0})
    if params is not None:
        body = f'{body[:-1]}, "kv_transfer_params": {params}}}'
    request = urllib.request.Request(f"{server.address}/v1/completions", body.encode(), JSON | headers)
    with urllib.request.urlopen(request) as reply:
        answer: dict[str, Any] = json.load(reply)
    details = answer["usage"]["prompt_tokens_details"]
    return answer["choices"][0]["text"], details["cached_tokens"] if details else 0


def counted(address, metric, *labels):
    with urllib.request.urlopen(f"{address}/metrics") as answer:
        lines = [line for line in answer.read().decode().splitlines() if line.startswith(metric)]
    return sum(float(line.rpartition(" ")[2]) for line in lines if all(label in line for label in labels))
