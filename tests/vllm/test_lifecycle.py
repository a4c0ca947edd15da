"""Ends: what is left of an engine that is killed or shut down."""

import multiprocessing
import os
import signal
import threading

from tests.vllm.engines import PROMPT_HITS, Engine, computed, hits, kvtier, prompts, right, tokens
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
