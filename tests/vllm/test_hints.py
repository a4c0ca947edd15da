"""Hints in `kv_transfer_params`: they reach kvtier from a request's body and from `SamplingParams`, through both doors.

No request fails for its hint, whatever is in it.
"""

import json
import math
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.remote.servers import ENDS_WITH_US
from tests.vllm.engines import PROMPT_HITS, PROMPT_TOKENS, Engine, fill, hits, kvtier, prompts, right, tokens
from tests.vllm.test_examples import environment, free_port  # noqa: F401  # A fixture.
from tests.vllm.test_secondary import behind_vllm, tier_of

EXAMPLES = Path(__file__).parents[2] / "examples"
BLOCKS = PROMPT_HITS // 32

NO_HINTS: list[object] = [  # Integers of more than 64 bits vLLM itself refuses, wherever they are in a request.
    "over",
    b"over",
    7,
    1e308,
    True,
    ["over"],
    {"over": "yes"},
    {"over": 1},
    {"over": None},
    {"returns_in_s": "soon"},
    {"returns_in_s": math.nan},
    {"returns_in_s": math.inf},
    {"returns_in_s": -1},
    {"returns_in_s": -(1 << 63)},
    {"retain_s": {"seconds": 3}},
    {"priority": 100},
    {"priority": -1},
    {"priority": 2.5},
    {"tokens": -(1 << 63)},
    {"class": ["a"]},
    {"class": "x" * 100_000},
    {"class_": "agent"},
    {"no_store": "yes"},
    {"no_store": {"0:fs": True}},
    {"no_store": [1]},
    {"forever": True},
    {7: True},
    {"over": {"over": {"over": [[[[]]]]}}},
]


def door(name: str, disk: Path) -> dict[str, Any]:
    return kvtier(disk) if name == "first" else behind_vllm(disk)


def of_kvtier(engine: Engine, name: str) -> tuple[Any, dict[str, int]]:
    """Return the tier, and what was ignored of hints."""
    if name == "first":
        return engine.ledger.tiers[0], engine.ledger.hints_ignored.counts
    client = tier_of(engine)._client
    return client.tier, client.hints_ignored.counts


@pytest.mark.parametrize("name", ["first", "second"])
def test_nothing_of_a_request_that_says_so_is_stored_in_a_tier(llama, disk, name):
    secret, other = prompts(2)
    expected = right(llama, [secret, other])
    with Engine(llama, door(name, disk)) as engine:
        tier, ignored = of_kvtier(engine, name)
        (answer,) = engine.answer([secret], hint={"no_store": True})
        engine.settle()
        assert (answer.tokens, tier.counters.stored) == (expected[0], 0)
        assert tier.counters.skipped == {"no_store": BLOCKS}
        engine.answer([other], hint={"no_store": ["another tier"]})
        engine.settle()
        assert tier.counters.stored == BLOCKS
        assert ignored == ({"tier": 1} if name == "first" else {})  # Behind vLLM's manager a tier knows no other.
    with Engine(llama, door(name, disk)) as engine:
        answers = engine.answer([secret, other])
        assert (tokens(answers), hits(answers)) == (expected, [0, PROMPT_HITS])


def test_a_tier_may_be_left_out_by_its_name(llama, tmp_path):
    (asked,) = prompts(1)
    tiers = [{"type": "fs", "name": name, "root": str(tmp_path / name)} for name in ("own", "shared")]
    with Engine(llama, kvtier(secondary_tiers=tiers)) as engine:
        engine.answer([asked], hint={"no_store": ["shared"]})
        engine.settle()
        assert [tier.counters.stored for tier in engine.ledger.tiers] == [BLOCKS, 0]


@pytest.mark.parametrize("name", ["first", "second"])
def test_no_request_fails_for_its_hint(llama, disk, name):
    """Each is answered, and counted; what is no hint does nothing."""
    asked = prompts(2)
    expected = right(llama, asked)
    with Engine(llama, door(name, disk)) as engine:
        tier, ignored = of_kvtier(engine, name)
        for count, given in enumerate(NO_HINTS, 1):
            assert tokens(engine.answer(asked[count % 2 :][:1], hint=given)) == [expected[count % 2]], given
            assert sum(ignored.values()) == count, given
        engine.settle()
        assert tier.counters.stored == 2 * BLOCKS


@pytest.mark.parametrize("name", ["first", "second"])
@pytest.mark.parametrize(
    "hint",
    [
        {},
        {"over": True, "class": "agent"},
        {"returns_in_s": 30, "retain_s": 600.5, "priority": 99, "tokens": 512},
        {"tokens": 1 << 60, "retain_s": 1e308},
    ],
)
def test_a_hint_changes_no_answer(llama, disk, name, hint):
    asked = prompts(4)
    expected = right(llama, asked)
    assert fill(llama, door(name, disk), asked) == expected
    with Engine(llama, door(name, disk)) as engine:
        for _ in range(2):
            answers = engine.answer(asked, hint=hint)
            assert (tokens(answers), hits(answers)) == (expected, [PROMPT_HITS] * 4)
            engine.settle()
            engine.llm.reset_prefix_cache()
        assert of_kvtier(engine, name)[1] == {}


# From a request's body.


@pytest.fixture
def server(environment, tmp_path) -> Iterator[str]:  # noqa: F811
    """vLLM's server over kvtier and an empty directory; its address."""
    model, port = str(tmp_path / "model"), free_port()
    subprocess.run([sys.executable, str(EXAMPLES / "vllm_tiny_model.py"), model], env=environment, check=True)
    transfer = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
    options = {
        "--served-model-name": "demo",
        "--host": "127.0.0.1",
        "--port": str(port),
        "--max-model-len": "1280",
        "--block-size": "32",
        "--num-gpu-blocks-override": "48",
        "--kv-transfer-config": json.dumps(transfer | {"kv_connector_extra_config": kvtier(tmp_path / "tier")}),
    }
    command = ["vllm", "serve", model, "--enforce-eager", *(word for option in options.items() for word in option)]
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", ENDS_WITH_US, *command], env=environment | {"VLLM_CPU_KVCACHE_SPACE": "1"}
    )
    try:
        address = f"http://127.0.0.1:{port}"
        while not answers(f"{address}/health"):
            assert process.poll() is None, "the server ended before it answered"
            time.sleep(0.1)
        yield address
    finally:
        process.terminate()
        process.wait()


def answers(address: str) -> bool:
    try:
        with urllib.request.urlopen(address):
            return True
    except OSError:
        return False


def post(address: str, words: str, params: str | None) -> str:
    """Ask for a completion with these `kv_transfer_params`, which are JSON as it stands in a body; return its text."""
    body = json.dumps({"model": "demo", "prompt": words, "max_tokens": 8, "temperature": 0})
    if params is not None:
        body = f'{body[:-1]}, "kv_transfer_params": {params}}}'
    request = urllib.request.Request(
        f"{address}/v1/completions", body.encode(), {"Content-Type": "application/json"}, method="POST"
    )
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)["choices"][0]["text"]


def test_a_hint_in_the_body_of_a_request_reaches_kvtier(server):
    """And what cannot be read does not fail the request, whatever JSON it is."""
    words = " ".join(f"w{number * 7_919 % 1_000}" for number in range(PROMPT_TOKENS))
    text = post(server, words, '{"kvtier": {"no_store": true, "class": "agent"}}')
    unread = ['"over"', "[]", "7", '{"over": "yes"}', '{"returns_in_s": NaN}', '{"returns_in_s": 1e999}', '{"a": {}}']
    for hint in unread:
        assert post(server, words, f'{{"kvtier": {hint}}}') == text, hint
    assert post(server, words, None) == text
    assert counted(server, "kvtier_hints_ignored_total") == len(unread)
    assert counted(server, "kvtier_tier_skipped_total") == BLOCKS
    assert counted(server, "kvtier_tier_stored_total") == 0


def counted(address: str, metric: str) -> float:
    """Return what a server's /metrics says of a metric, all its labels together."""
    with urllib.request.urlopen(f"{address}/metrics") as answer:
        lines = [line for line in answer.read().decode().splitlines() if line.startswith(metric)]
    return sum(float(line.rpartition(" ")[2]) for line in lines)
