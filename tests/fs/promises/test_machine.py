"""The tier against a dictionary: stored, damaged, deleted and reopened in whatever order, it says the truth."""

import asyncio
import os
import shutil
import tempfile
from pathlib import Path
from typing import ClassVar

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvtier.backend import Advice, FileMapper, Namespace, TierContext
from kvtier.testing.conformance import Lender, key_of, label
from kvtier_backends.fs import FsBackend, FsOptions
from tests.fs.conftest import DEADLINE_S, places_in, taken_bytes

ROW_BYTES = 4_096
CAPACITY_BYTES = 256 << 10

numbers = st.integers(0, 15)
several = st.lists(numbers, min_size=1, max_size=4, unique=True)


class Tier(RuleBasedStateMachine):
    """One directory, through any number of lives.

    What is `stored` was said to be; the bytes of what is `damaged` are not what they were.
    """

    laid_out: ClassVar[dict[str, str]]

    @initialize(bounded=st.booleans())
    def begin(self, bounded):
        in_memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
        self.root = Path(tempfile.mkdtemp(dir=in_memory))
        self.bounded = bounded
        capacity_bytes = CAPACITY_BYTES if bounded else 2 << 20  # The latter is room for all there is.
        self.options = FsOptions(root=str(self.root), capacity_bytes=capacity_bytes, **self.laid_out)
        self.mapper = FileMapper(Namespace(model_name="machine"), self.laid_out.get("naming", "vllm"))
        self.runner = asyncio.Runner()
        self.lender = Lender(ROW_BYTES)
        self.stored = {}
        self.damaged = set()
        self.open()

    def teardown(self):
        if hasattr(self, "tier"):
            self.load(list(range(16)))  # Everything is looked at in the end.
            assert self.runner.run(self.tier.aclose(DEADLINE_S)) == (0,)
            assert self.lender.take_back()
            self.runner.close()
            shutil.rmtree(self.root)

    def open(self):
        context = TierContext("0:fs", self.mapper, ROW_BYTES)
        self.tier = self.runner.run(FsBackend.open(self.options, context))

    @rule(which=several, version=st.integers(0, 9))
    def store(self, which, version):
        outcomes = self.runner.run(self.tier.store(self.lender.writes([key_of(number) for number in which], version)))
        for number, outcome in zip(which, outcomes, strict=True):
            if outcome is None:
                self.stored[number] = version
                self.damaged.discard(number)
            else:
                assert self.bounded, outcome

    @rule(which=several)
    def load(self, which):
        told = self.runner.run(self.lender.recall(self.tier, [key_of(number) for number in which]))
        for number, chunk in zip(which, told, strict=True):
            if number in self.damaged:
                assert chunk in ("ChunkCorrupt", "ChunkMissing")
            elif number in self.stored and not self.bounded:
                assert chunk == label(key_of(number), self.stored[number])
            elif number in self.stored:
                assert chunk in ("ChunkMissing", label(key_of(number), self.stored[number]))
            else:
                assert chunk == "ChunkMissing"
            if chunk in ("ChunkCorrupt", "ChunkMissing"):
                self.stored.pop(number, None)
                self.damaged.discard(number)

    @rule(which=several)
    def delete(self, which):
        self.runner.run(self.tier.delete([key_of(number) for number in which]))
        for number in which:
            self.stored.pop(number, None)
            self.damaged.discard(number)

    @rule(pick=st.integers(0, 15), at=st.integers(0, ROW_BYTES - 1))
    def damage(self, pick, at):
        sound = sorted(self.places().keys() & (self.stored.keys() - self.damaged))
        if sound:
            number = sound[pick % len(sound)]
            path, begins = self.places()[number]
            with path.open("r+b") as file:
                file.seek(begins + at)
                (byte,) = file.read(1)
                file.seek(begins + at)
                file.write(bytes([byte ^ 1]))
            self.damaged.add(number)

    def places(self):
        places = places_in(self.root, ROW_BYTES)
        return {number: places[key_of(number)] for number in range(16) if key_of(number) in places}

    @rule(which=several)
    def rank(self, which):
        self.tier.advise(Advice("rank", [key_of(number) for number in which]))

    @rule()
    def reopen(self):
        assert self.runner.run(self.tier.aclose(DEADLINE_S)) == (0,)
        self.open()

    @invariant()
    def never_too_much(self):
        if hasattr(self, "tier") and self.bounded:
            assert taken_bytes(self.root) <= CAPACITY_BYTES


class Files(Tier):
    laid_out: ClassVar = {"naming": "vllm"}

    @rule(pick=st.integers(0, 15), length=st.none() | st.integers(0, ROW_BYTES - 1))
    def cut(self, pick, length):
        """Take a file away underfoot, or cut it off."""
        sound = sorted(self.places().keys() & (self.stored.keys() - self.damaged))
        if sound:
            number = sound[pick % len(sound)]
            path, _ = self.places()[number]
            path.unlink() if length is None else os.truncate(path, length)
            self.damaged.add(number)


class Segments(Tier):
    laid_out: ClassVar = {"layout": "segments"}


TestFiles, TestSegments = Files.TestCase, Segments.TestCase
TestFiles.settings = settings(stateful_step_count=40, max_examples=max(15, settings().max_examples // 4))
TestSegments.settings = TestFiles.settings
