"""Beginnings and ends: what is refused at the start, what two engines share, what is left when they end."""

import multiprocessing
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvtier.errors import ConfigError
from tests.vllm.engines import PROMPT_HITS, Engine, computed, hits, kvtier, kvtier_files, prompts, right, tokens
from tests.vllm.leftovers import leftovers, runners, wait_until_gone
from tests.vllm.peer import start


def answer_until_killed(connection, model, disk):
    engine = Engine(model, kvtier(disk), tensor_parallel_size=2)
    engine.answer(prompts(2))
    engine.settle()
    connection.send([os.getpid(), *(worker.pid for worker in multiprocessing.active_children())])
    while True:
        engine.answer(prompts(2, seed=1))


def test_an_engine_that_is_killed_leaves_nothing_and_its_chunks(llama, disk):
    before = leftovers()
    process, connection = start(answer_until_killed, llama, disk)
    for pid in connection.recv():
        os.kill(pid, signal.SIGKILL)
    process.join()
    assert wait_until_gone(before) == set()
    asked = prompts(2)
    expected = right(llama, asked)
    with Engine(llama, kvtier(disk)) as again:
        assert (tokens(answers := again.answer(asked)), hits(answers)) == (expected, [PROMPT_HITS] * 2)


def test_after_a_shutdown_nothing_is_left(llama, disk):
    with Engine(llama):  # What vLLM itself leaves, such as its pools of threads, is there from now on.
        pass
    before = threads(), descriptors()
    for _ in range(3):
        computed(llama, kvtier(disk), prompts(2))
    assert runners() == set()
    assert not {name for name in threads() - before[0] if "kvtier" in name}
    assert {name for name in descriptors() - before[1] if "kvtier" in name or "memfd" in name} == set()


def threads():
    return {thread.name for thread in threading.enumerate()}


def descriptors():
    found = set()
    for number in os.listdir("/proc/self/fd"):
        try:
            found.add(os.readlink(f"/proc/self/fd/{number}"))
        except FileNotFoundError:  # The listing's own.
            continue
    return found


def test_two_engines_share_one_directory_at_the_same_time(llama, disk, peer):
    """The other engine, in another process, writes and reads what this one does."""
    asked = prompts(4)
    expected, extra = right(llama, asked), kvtier_files(disk, shared=True, cpu_bytes_to_use="5MiB")
    with peer.engine(llama, extra) as other, Engine(llama, extra) as engine, ThreadPoolExecutor(1) as pool:
        theirs = pool.submit(lambda: [other.answer(given) for given in (asked[:2], *[prompts(2, seed=1)] * 6)])
        while not theirs.done():
            assert tokens(engine.answer(asked)) == expected
        assert (tokens(theirs.result()[0]), tokens(engine.answer(asked))) == (expected[:2], expected)
    with Engine(llama, kvtier_files(disk, shared=True)) as engine:
        assert (tokens(answers := engine.answer(asked)), hits(answers)) == (expected, [PROMPT_HITS] * 4)


def test_a_second_engine_on_a_root_that_is_not_shared_is_refused_by_the_name_of_the_first(llama, disk, peer):
    refusal = rf"is used by tier 0:fs of process {os.getpid()} .*\{{dp_rank\}}.*shared = true"
    with Engine(llama, kvtier(disk)) as engine:
        with pytest.raises(AssertionError, match=refusal), peer.engine(llama, kvtier(disk)):
            pass
        assert tokens(engine.answer(prompts(2))) == right(llama, prompts(2))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cpu_bytes": "1GiB"}, r"kv_connector_extra_config.cpu_bytes: no such field; did you mean 'cpu_bytes_to_use'"),
        ({"cpu_bytes_to_use": 4096}, r"cpu_bytes_to_use: 4,096 bytes given, which hold 0 rows"),
        ({"secondary_tiers": [{"type": "fs", "root": "/no/such/place"}]}, r"/no/such/place"),
    ],
)
def test_a_configuration_that_cannot_be_used_says_where(llama, changes, message):
    with pytest.raises(ConfigError, match=message):
        Engine(llama, kvtier(**changes))
