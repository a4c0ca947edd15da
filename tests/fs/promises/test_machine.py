"""The tier against a dictionary: stored, damaged, deleted and reopened in whatever order, it says the truth."""

import asyncio
import os
import shutil
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvtier.backend import Advice
from kvtier.backend.contract import TierContext
from kvtier.backend.namespace import FileMapper, Namespace, NamingKind
from kvtier.testing.conformance import Lender
from kvtier.testing.conformance.lender import key_of, label
from kvtier_backends.fs import FsBackend, FsOptions

ROW_BYTES = 4_096
CAPACITY_BYTES = 256 << 10
CLOSE_S = 20.0

numbers = st.integers(0, 15)
several = st.lists(numbers, min_size=1, max_size=4, unique=True)


class Tier(RuleBasedStateMachine):
    """One directory, through any number of lives.

    What is `stored` was said to be; the file of what is `damaged` is not what it was.
    """

    @initialize(bounded=st.booleans(), naming=st.sampled_from(["vllm", "flat"]))
    def begin(self, bounded: bool, naming: NamingKind) -> None:
        in_memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
        self.root = Path(tempfile.mkdtemp(dir=in_memory))
        self.capacity_bytes = CAPACITY_BYTES if bounded else None
        self.options = FsOptions(root=str(self.root), naming=naming, capacity_bytes=self.capacity_bytes)
        self.mapper = FileMapper(Namespace(model_name="machine"), naming)
        self.runner = asyncio.Runner()
        self.lender = Lender(ROW_BYTES)
        self.stored: dict[int, int] = {}
        self.damaged: set[int] = set()
        self.open()

    def teardown(self) -> None:
        if hasattr(self, "tier"):
            self.load(list(range(16)))  # Everything is looked at in the end.
            assert self.runner.run(self.tier.aclose(CLOSE_S)) == (0,)
            assert self.lender.take_back()
            self.runner.close()
            shutil.rmtree(self.root)

    def open(self) -> None:
        context = TierContext("0:fs", self.mapper, ROW_BYTES)
        self.tier = self.runner.run(FsBackend.open(self.options, context))

    @rule(which=several, version=st.integers(0, 9))
    def store(self, which: list[int], version: int) -> None:
        outcomes = self.runner.run(self.tier.store(self.lender.writes([key_of(number) for number in which], version)))
        for number, outcome in zip(which, outcomes, strict=True):
            if outcome is None:
                self.stored[number] = version
                self.damaged.discard(number)
            else:
                assert self.capacity_bytes is not None, outcome

    @rule(which=several)
    def load(self, which: list[int]) -> None:
        told = self.runner.run(self.lender.recall(self.tier, [key_of(number) for number in which]))
        for number, chunk in zip(which, told, strict=True):
            if number in self.damaged:
                assert chunk in ("ChunkCorrupt", "ChunkMissing")
            elif number in self.stored and self.capacity_bytes is None:
                assert chunk == label(key_of(number), self.stored[number])
            elif number in self.stored:
                assert chunk in ("ChunkMissing", label(key_of(number), self.stored[number]))
            else:
                assert chunk == "ChunkMissing"
            if chunk in ("ChunkCorrupt", "ChunkMissing"):
                self.stored.pop(number, None)
                self.damaged.discard(number)

    @rule(which=several)
    def delete(self, which: list[int]) -> None:
        self.runner.run(self.tier.delete([key_of(number) for number in which]))
        for number in which:
            self.stored.pop(number, None)
            self.damaged.discard(number)

    @rule(pick=st.integers(0, 15), at=st.integers(0, ROW_BYTES - 1), length=st.none() | st.integers(0, ROW_BYTES))
    def damage(self, pick: int, at: int, length: int | None) -> None:
        """Flip a bit of a file, or cut it off; one that is damaged is left, for two flips make a whole."""
        if (path := self.spoil(pick)) is not None:
            content = bytearray(path.read_bytes())
            content[at] ^= 1
            path.write_bytes(content if length is None else content[:length])

    @rule(pick=st.integers(0, 15))
    def remove(self, pick: int) -> None:
        """Take a file away underfoot."""
        if (path := self.spoil(pick)) is not None:
            path.unlink()

    def spoil(self, pick: int) -> Path | None:
        """Choose a sound chunk's file and count it as damaged; None if there is none."""
        sound = {number: self.root / self.mapper.name(key_of(number)) for number in self.stored.keys() - self.damaged}
        there = sorted(number for number, path in sound.items() if path.exists())
        if not there:
            return None
        number = there[pick % len(there)]
        self.damaged.add(number)
        return sound[number]

    @rule(which=several)
    def rank(self, which: list[int]) -> None:
        self.tier.advise(Advice("rank", [key_of(number) for number in which]))

    @rule()
    def reopen(self) -> None:
        assert self.runner.run(self.tier.aclose(CLOSE_S)) == (0,)
        self.open()

    @invariant()
    def never_too_much(self) -> None:
        if hasattr(self, "tier") and self.capacity_bytes is not None:
            taken_bytes = sum(path.lstat().st_blocks * 512 for path in self.root.rglob("*"))
            assert taken_bytes <= self.capacity_bytes


TestTier = Tier.TestCase
TestTier.settings = settings(stateful_step_count=40, max_examples=max(25, settings().max_examples // 2))
