"""The README's lines that start a server, run as a reader copies them."""

import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvtier.integrations.vllm_options import read_options
from tests.docs import readme
from tests.remote.servers import ServerProcess, free_port
from tests.vllm.test_examples import EXAMPLES, environment

__all__ = ["environment"]  # A fixture.

HOST_MEMORY = '"cpu_bytes_to_use": "8G"'
LESS_MEMORY = '"cpu_bytes_to_use": "64M"'
# What a tiny model on a CPU wants besides, and what tells of hits. Blocks are for one prompt and a half.
BESIDES = "--host 127.0.0.1 --port {port} --block-size 32 --num-gpu-blocks-override 48 --max-model-len 1280"
BESIDES += " --enforce-eager --enable-prompt-tokens-details"
PROMPT = " ".join(f"w{number * 7919 % 1_000}" for number in range(1_000))
PROMPT_HITS = 992  # Every whole block of it.
IN_THIS_PROCESS = "VLLM_ENABLE_V1_MULTIPROCESSING"  # Set for the tests; a reader's server has its engine in another.


def test_the_configuration_in_the_lines_is_one_that_the_connector_reads():
    extra = json.loads(readme.serve_arguments()[-1])["kv_connector_extra_config"]
    assert read_options(extra).cpu_bytes_to_use == 8 << 30


def test_three_lines_start_a_server_that_finds_on_disk_what_the_one_before_computed(environment, tmp_path):
    model, disk = tmp_path / "model", tmp_path / "tier"
    subprocess.run([sys.executable, str(EXAMPLES / "vllm_tiny_model.py"), str(model)], env=environment, check=True)
    environment |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
    answers = []
    for _ in range(2):
        with served(model, disk, environment) as address:
            answers.append(asked(address, model))
    (first, none), (again, found) = answers
    assert (none, found) == (0, PROMPT_HITS)
    assert first == again


@contextmanager
def served(model: Path, disk: Path, environment: dict[str, str]) -> Iterator[str]:
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


def healthy(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"{address}/health"):
            return True
    except (urllib.error.URLError, ConnectionError):
        return False


def asked(address: str, model: Path) -> tuple[str, int]:
    """Return the answer to the prompt, and how many of its tokens were cached."""
    question = {"model": str(model), "prompt": PROMPT, "max_tokens": 8, "temperature": 0}
    request = urllib.request.Request(
        f"{address}/v1/completions", json.dumps(question).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request) as reply:
        answer: dict[str, Any] = json.load(reply)
    details = answer["usage"]["prompt_tokens_details"]
    return answer["choices"][0]["text"], details["cached_tokens"] if details else 0
