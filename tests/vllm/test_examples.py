"""The examples inside vLLM, run as their readers run them; the server's with somebody who listens to its events."""

import os
import re
import runpy
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from tempfile import gettempdir

import msgspec
import pytest
import zmq
from prometheus_client.parser import text_string_to_metric_families
from vllm.distributed.kv_events import BlockStored, KVEventBatch

from tests.remote.servers import free_port
from tests.vllm.peer import printed

EXAMPLES = Path(__file__).parents[2] / "examples"
TOPIC = "kvtier"
PLUG_IN = """
import multiprocessing
import vllm
from vllm.v1.engine import utils
from vllm.v1.executor import multiproc_executor
def register():
    multiproc_executor.get_mp_context = utils.get_mp_context = lambda: multiprocessing.get_context("fork")
"""


def environment_in(folder):
    """Return this environment as if it had been activated, without what the tests set for themselves."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}
    return kept | {
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "TMPDIR": str(folder),
        "VLLM_RPC_BASE_PATH": gettempdir(),  # A socket's path has 107 characters at most.
    }


def with_one_import(folder, *lines):
    """Return variables with which a server's processes run these lines first, and fork: vLLM is imported once."""
    (folder / "tests_plug_in.py").write_text("\n    ".join([PLUG_IN.rstrip(), *lines]))
    information = folder / "tests_plug_in-1.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: tests-plug-in\nVersion: 1\n")
    (information / "entry_points.txt").write_text("[vllm.general_plugins]\ntests = tests_plug_in:register\n")
    return {"PYTHONPATH": os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])}


def run_example(name, folder):
    os.chdir(folder)
    sys.path.insert(0, str(EXAMPLES))
    sys.argv = [str(EXAMPLES / name)]
    runpy.run_path(sys.argv[0], run_name="__main__")


def test_prompts_come_back_from_memory_and_from_disk(tmp_path):
    output = printed(run_example, "vllm_offline.py", tmp_path)
    cached = dict(re.findall(r"(new|memory|disk).*?: ([\d,]+) of 6,000 prompt tokens", output))
    assert cached == {"new": "0", "memory": "5,952", "disk": "5,952"}
    assert "the same answers each time: True" in output


def test_a_server_counts_on_metrics_and_tells_a_subscriber(tmp_path):
    if shutil.which("curl") is None:
        pytest.skip("examples/vllm_serve.sh asks its server with curl, which is not installed")
    ends = f"ipc://{tmp_path}/events"
    events = msgspec.json.encode(
        {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": ends, "topic": TOPIC, "hwm": 10_000}
    ).decode()
    with zmq.Context() as context, context.socket(zmq.SUB) as subscriber:
        subscriber.connect(ends)
        subscriber.setsockopt_string(zmq.SUBSCRIBE, TOPIC)
        command = ["bash", str(EXAMPLES / "vllm_serve.sh"), "--kv-events-config", events]
        given = {"PORT": str(free_port()), "KVTIER": str(tmp_path / "tier")} | with_one_import(tmp_path)
        environment = environment_in(tmp_path) | given
        done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-4_000:]
        stored = told(subscriber)
    assert re.findall(r"prompt.*?(\d+) tokens cached", done.stdout) == ["0", "0", "0", "992"]
    metrics = scraped(done.stdout)
    assert metrics["kvtier_primary_hits_total", None, None] == 31
    assert metrics["kvtier_tier_stored_total", "0:fs", None] == 93
    assert 0 < metrics["kvtier_tier_chunks", "0:fs", None] <= 93  # As of the last step of an engine that now idles.
    assert metrics["kvtier_tier_breaker", "0:fs", "closed"] == 1
    assert stored["CPU", None] == stored["STORAGE", "0:fs"] == 93
    assert list((tmp_path / "tier").rglob("*.seg"))


def scraped(page):
    lines = "".join(line + "\n" for line in page.splitlines() if line.startswith("kvtier_"))
    return {
        (sample.name, sample.labels.get("tier"), sample.labels.get("state")): sample.value
        for family in text_string_to_metric_families(lines)
        for sample in family.samples
    }


def told(subscriber):
    """Count the blocks stored that the events tell of, by medium and tier; they are all there: the server has ended."""
    decode = msgspec.msgpack.Decoder(KVEventBatch).decode
    found: Counter[tuple[str | None, str | None]] = Counter()
    while subscriber.poll(1_000):
        _, _, payload = subscriber.recv_multipart()
        for event in decode(payload).events:
            if isinstance(event, BlockStored):
                found[event.medium, event.ownership] += len(event.block_hashes)
    return found
