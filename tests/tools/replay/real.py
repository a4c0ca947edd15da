"""Real traces, which are no part of the project: their names, and the folder that has them."""

import pytest

from kvtier.tools.replay.study import measure
from kvtier.tools.replay.traces import Trace

CONVERSATION = "mooncake_conversation.jsonl.gz"
MINI_SWE = "lmcache_miniswe_b16.jsonl.gz"
AGENTIC = "agentic_local_b512.jsonl.zst"
SIZES = ("0.01", "0.05", "0.10", "0.25", "0.50")


class Traces:
    """The folder of the real traces. A test that asks for a file that is not there is skipped."""

    def __init__(self, folder):
        self._folder, self._extents = folder, {}

    def __truediv__(self, name):
        path = self._folder / name
        if not path.is_file():
            pytest.skip(
                f"{name} is not in {self._folder}: put it there, or name a folder that has it in KVTIER_TRACES; "
                "docs/how-to/contribute.md says where it comes from"
            )
        return path

    def extent(self, name):
        if name not in self._extents:
            self._extents[name] = measure(Trace(self / name))
        return self._extents[name]
