"""The README's lines that start a server, run as a reader copies them."""

import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.docs import readme
from tests.remote.servers import ServerProcess, free_port
from tests.vllm.test_examples import EXAMPLES, environment_in

HOST_MEMORY = '"cpu_bytes_to_use": "8G"'
LESS_MEMORY = '"cpu_bytes_to_use": "64M"'
# What a tiny model on a CPU wants besides, and what tells of hits. Blocks are for one prompt and a half.
BESIDES = "--host 127.0.0.1 --port {port} --block-size 32 --num-gpu-blocks-override 48 --max-model-len 1280"
BESIDES += " --enforce-eager --enable-prompt-tokens-details"
PROMPT = " ".join(f"w{number * 7919 % 1_000}" for number in range(1_000))
OTHER = " ".join(f"w{number * 7919 % 1_000}" for number in range(1, 1_001))
PROMPT_HITS = 992  # Every whole block of it.
IN_THIS_PROCESS = "VLLM_ENABLE_V1_MULTIPROCESSING"  # Set for the tests; a reader's server has its engine in another.


class Servers(NamedTuple):
    """Two servers, one after the other: what each answered to the prompt, and the address of the second."""

    answers: list[tuple[str, int]]
    address: str
    model: Path


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("readme")
    model, disk, given = folder / "model", folder / "tier", environment_in(folder)
    subprocess.run([sys.executable, str(EXAMPLES / "vllm_tiny_model.py"), str(model)], env=given, check=True)
    given |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
    with served(model, disk, given) as address:
        first = asked(address, model)
    with served(model, disk, given) as address:
        yield Servers([first, asked(address, model)], address, model)


def test_three_lines_start_a_server_that_finds_on_disk_what_the_one_before_computed(servers):
    (first, none), (again, found) = servers.answers
    assert (none, found) == (0, PROMPT_HITS)
    assert first == again


def test_a_hint_in_the_body_of_a_request_reaches_kvtier(servers):
    """What cannot be read does not fail the request, whatever JSON it is."""
    names = ("hints_ignored", "tier_skipped", "tier_stored")
    before = [counted(servers.address, f"kvtier_{name}_total") for name in names]
    (text, _) = asked(servers.address, servers.model, OTHER, '{"kvtier": {"no_store": true, "class": "agent"}}')
    unread = ['"over"', "[]", "7", '{"over": "yes"}', '{"returns_in_s": NaN}', '{"returns_in_s": 1e999}', '{"a": {}}']
    for hint in unread:
        assert asked(servers.address, servers.model, OTHER, f'{{"kvtier": {hint}}}')[0] == text, hint
    assert asked(servers.address, servers.model, OTHER)[0] == text
    after = [counted(servers.address, f"kvtier_{name}_total") for name in names]
    assert [late - early for early, late in zip(before, after, strict=True)] == [len(unread), PROMPT_HITS // 32, 0]


@contextmanager
def served(model, disk, environment):
    """Start a server by the README's lines, with other names and less memory; give its address once it answers."""
    port = free_port()
    lines = readme.serve()
    for written, here in ((readme.MODEL, str(model)), (readme.DIRECTORY, str(disk)), (HOST_MEMORY, LESS_MEMORY)):
        assert lines.count(written) == 1
        lines = lines.replace(written, here)
    command = ["env", f"--unset={IN_THIS_PROCESS}", "bash", "-c", f"exec {lines} {BESIDES.format(port=port)}"]
    server = ServerProcess(command, disk.parent / "server.log", environment)
    try:
        address = f"http://127.0.0.1:{port}"
        while not healthy(address):
            server.check()
            time.sleep(0.1)
        yield address
        server.stop()
    finally:
        server.kill()


def healthy(address):
    try:
        with urllib.request.urlopen(f"{address}/health"):
            return True
    except (urllib.error.URLError, ConnectionError):
        return False


def asked(address, model, prompt=PROMPT, params=None):
    """Return the answer to a prompt with these `kv_transfer_params`, and how many of its tokens were cached."""
    body = json.dumps({"model": str(model), "prompt": prompt, "max_tokens": 8, "temperature": 0})
    if params is not None:
        body = f'{body[:-1]}, "kv_transfer_params": {params}}}'
    request = urllib.request.Request(f"{address}/v1/completions", body.encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as reply:
        answer: dict[str, Any] = json.load(reply)
    details = answer["usage"]["prompt_tokens_details"]
    return answer["choices"][0]["text"], details["cached_tokens"] if details else 0


def counted(address, metric):
    """Return what a server's /metrics says of a metric, all its labels together."""
    with urllib.request.urlopen(f"{address}/metrics") as answer:
        lines = [line for line in answer.read().decode().splitlines() if line.startswith(metric)]
    return sum(float(line.rpartition(" ")[2]) for line in lines)
