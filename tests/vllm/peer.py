"""Another host: a vLLM engine in a process of its own, beside the one that the test itself has."""

import multiprocessing
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

from tests.remote.servers import PATIENCE_S
from tests.vllm.engines import NEW_TOKENS, Answer, Engine, Prompt


class Peer:
    """The process. It has one engine at a time, and ends with its test run, however that ends."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("forkserver")  # It has imported vLLM.
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs,), name="another host")
        self._process.start()
        theirs.close()

    @contextmanager
    def engine(self, model: str, offloading: Mapping[str, Any] | None, **changes: Any) -> "Iterator[Peer]":
        """Have an engine there for as long as the context lasts."""
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
    """Do what the test says, until it says nothing any more."""
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
        except Exception:  # noqa: BLE001  # It belongs to whoever asked.
            connection.send((False, traceback.format_exc()))
