"""Other processes with a vLLM engine. They fork from one that has imported vLLM: an import takes longer than a test."""

import multiprocessing
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from tests.remote.servers import PATIENCE_S
from tests.vllm.engines import NEW_TOKENS, Answer, Engine, Prompt


def start(target: Callable[..., None], *given: Any) -> tuple[BaseProcess, Connection]:
    """Start a function of a module in another process; it is given one end of a connection first."""
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe()
    process = context.Process(target=target, args=(theirs, *given))
    process.start()
    theirs.close()
    return process, ours


class Peer:
    """A process that has one engine at a time. It ends with its test run, however that ends."""

    def __init__(self) -> None:
        self._process, self._connection = start(serve)

    @contextmanager
    def engine(self, model: str, offloading: Mapping[str, Any] | None, **changes: Any) -> "Iterator[Peer]":
        """Keep an engine there for as long as the context lasts; raises AssertionError if it does not start."""
        self._call("open", model, offloading, changes)
        try:
            yield self
        finally:
            self._call("close")

    def answer(self, given: Sequence[Prompt], new_tokens: int = NEW_TOKENS) -> list[Answer]:
        return self._call("answer", given, new_tokens)

    def settle(self) -> None:
        self._call("settle")

    def end(self) -> None:
        self._connection.close()
        self._process.join(PATIENCE_S)
        self._process.kill()  # It hangs; or it has ended.
        self._process.join()

    def _call(self, *words: Any) -> Any:
        self._connection.send(words)
        right, result = self._connection.recv()
        assert right, result
        return result


def serve(connection: Connection) -> None:
    """Do what the test asks, until it closes the connection."""
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
