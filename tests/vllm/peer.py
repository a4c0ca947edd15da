"""Other processes with a vLLM engine. They fork from one that has imported vLLM: an import takes longer than a test."""

import multiprocessing
import os
import sys
import traceback
from contextlib import contextmanager
from tempfile import NamedTemporaryFile

from tests.remote.servers import PATIENCE_S
from tests.vllm.engines import NEW_TOKENS, Engine


def start(target, *given):
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe()
    process = context.Process(target=target, args=(theirs, *given))
    process.start()
    theirs.close()
    return process, ours


def printed(target, *given):
    with NamedTemporaryFile("r") as output:
        process, _ = start(_print_to, output.name, target, *given)
        process.join()
        text = output.read()
    assert process.exitcode == 0, text[-4_000:]
    return text


def _print_to(connection, name, target, *given):
    sys.stdout = sys.stderr = open(name, "a", buffering=1)  # noqa: SIM115  # Until the process ends.
    for standard in (1, 2):
        os.dup2(sys.stdout.fileno(), standard)
    target(*given)


class Peer:
    """A process that has one engine at a time. It ends with its test run, however that ends."""

    def __init__(self):
        self._process, self._connection = start(serve)

    @contextmanager
    def engine(self, model, offloading, **changes):
        """Keep an engine there for as long as the context lasts; raises AssertionError if it does not start."""
        self._call("open", model, offloading, changes)
        try:
            yield self
        finally:
            self._call("close")

    def answer(self, given, new_tokens=NEW_TOKENS):
        return self._call("answer", given, new_tokens)

    def settle(self):
        self._call("settle")

    def end(self):
        self._connection.close()
        self._process.join(PATIENCE_S)
        self._process.kill()  # It hangs; or it has ended.
        self._process.join()

    def _call(self, *words):
        self._connection.send(words)
        right, result = self._connection.recv()
        assert right, result
        return result


def serve(connection):
    engine: Engine | None = None
    while True:
        try:
            what, *given = connection.recv()
        except EOFError:
            return
        try:
            match what:
                case "open":
                    model, offloading, changes = given
                    engine, result = Engine(model, offloading, **changes), None
                case _:
                    result = getattr(engine, what)(*given)
            connection.send((True, result))
        except Exception:  # noqa: BLE001  # The test raises it.
            connection.send((False, traceback.format_exc()))
