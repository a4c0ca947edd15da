"""Whatever happens to a tier costs hits, never an answer: right tokens, no crash, nothing stuck, and counted."""

import random
import time

import pytest

from tests.vllm.engines import PROMPT_HITS, Engine, fill, hits, kvtier, kvtier_files, prompts, right, tokens

FAULTY = "kvtier.testing.faults:FaultyBackend"


def chunk_files(disk):
    return sorted(disk.rglob("*.bin"))


def truncate(path, dice):
    with path.open("r+b") as file:
        file.truncate(dice.randrange(path.stat().st_size))


def flip_a_bit(path, dice):
    with path.open("r+b") as file:
        at = dice.randrange(path.stat().st_size)
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1 << dice.randrange(8)]))


def test_damaged_files_are_recomputed_and_counted(llama, disk):
    asked = prompts(6)
    expected = right(llama, asked)
    fill(llama, kvtier_files(disk), asked)
    dice = random.Random(11)
    with Engine(llama, kvtier_files(disk)) as engine:
        while not engine.ledger.tiers[0].authoritative:  # It has seen every file whole.
            engine.kvtier.end_step()
        for number, path in enumerate(dice.sample(chunk_files(disk), 12)):
            (truncate, flip_a_bit)[number % 2](path, dice)
        assert tokens(answers := engine.answer(asked)) == expected
        assert 0 < sum(hits(answers)) < 6 * PROMPT_HITS
        failures = engine.ledger.tiers[0].counters.failed
        assert sum(failures.values()) >= 6, failures
        engine.settle()
        assert tokens(engine.answer(asked)) == expected


def faulty(disk, **changes):
    tier = {"type": FAULTY, "inner": {"type": "fs", "root": str(disk)}, "limits": {"deadline_s": 0.5}}
    return kvtier(None, cpu_bytes_to_use="5MiB", secondary_tiers=[tier | changes])


def ask_thrice(llama, extra, asked):
    expected = right(llama, asked)
    with Engine(llama, extra | {"limits": {"close_s": 1.0}}) as engine:
        for _ in range(3):
            assert tokens(engine.answer(asked)) == expected
            engine.settle()
        return engine.ledger.tiers[0]


@pytest.mark.parametrize("operation", ["load", "store", "probe"])
def test_a_tier_that_hangs(llama, disk, operation):
    asked = prompts(4)
    begun = time.monotonic()
    inner = {"type": "fs", "root": str(disk), "shared": operation == "probe"}  # Else it says what it has, unasked.
    limits = {"deadline_s": 0.5, "breaker_failures": 1}
    tier = ask_thrice(llama, faulty(disk, inner=inner, limits=limits, script={operation: ["hang"] * 50}), asked)
    assert tier.breaker.opened > 0
    assert (tier.counters.failed.get("deadline", 0) > 0) is (operation != "probe")
    assert time.monotonic() - begun < 60


def test_a_tier_where_everything_fails_now_and_then(llama, disk):
    rates = {"failed": 0.1, "missing": 0.05, "corrupt": 0.05, "no_space": 0.05, "unavailable": 0.05}
    counters = ask_thrice(llama, faulty(disk, faults=rates, seed=3), prompts(8)).counters
    assert {"failed", "no_space"} <= counters.failed.keys(), counters.failed
