"""The scenario: all that a seed decides. An engine, its tiers and their faults, who uses it, and how its lives end."""

import random
from collections.abc import Sequence
from typing import Literal, NamedTuple

from kvtier import EngineConfig, OffloadKey, TierMatcher, make_offload_key
from tests.simulation.programs import Habits, some_hint
from tests.simulation.scheduler import Pace, Prompt
from tests.simulation.witness import WITNESS

ROW_BYTES = 4_096
DOCUMENT_CHUNKS_MAX = 9
# Listed here: what is installed beside kvtier changes no seed.
POLICIES = ("arc", "density", "fifo", "lru", "s3fifo")

Ending = Literal["crash", "close", "calm"]
"""The end of a life: everything stops at once; the engine is closed in mid-use; everybody finishes, nothing fails."""


class Life(NamedTuple):
    habits: Sequence[tuple[Habits, Sequence[TierMatcher] | None]]  # One a program.
    prompts: Sequence[Prompt]
    pace: Pace
    resets_s: Sequence[float]
    ending: Ending
    ends_s: float  # When, unless it is calm.


class Scenario(NamedTuple):
    seed: int
    config: EngineConfig
    strict: Sequence[bool]  # Of each tier: what it said is stored must be there at the end.
    documents: Sequence[Sequence[OffloadKey]]
    lives: Sequence[Life]


def draw(seed):
    dice = random.Random(seed)
    documents = _documents(dice)
    policy = dice.choice(POLICIES)
    tiers = [_tier(dice, seed, index) for index in range(dice.choice((0, 1, 1, 1, 2, 2, 3)))]
    chunk_bytes = dice.choice((ROW_BYTES, 3_000))
    for tier in tiers:
        tier["chunk_bytes"] = chunk_bytes
    described = {
        "cpu_bytes_to_use": dice.choice((1, 2, 3, 4, 6, 8, 12)) * ROW_BYTES,
        "chunk_bytes": chunk_bytes,
        "eviction_policy": policy,
        "runner": "inline",
        "secondary_tiers": tiers,
        "limits": {
            "cascade_share": dice.choice((0.25, 0.5, 1.0)),
            "leaving_share": random.Random(f"leaving of seed {seed}").choice((0.05, 0.3, 1.0)),
            "lease_share": dice.choice((0.25, 0.5, 1.0)),
            "lease_s": dice.choice((0.0, 0.5, 10.0)),
            "action_chunks": dice.choice((1, 3, 64)),
            "close_s": dice.choice((0.5, 5.0)),
        },
        "events": dice.random() < 0.3,
        **_weighing(seed),
    }
    fatal = ("crash", "crash", "crash", "close")
    endings = [*dice.choices(fatal, k=dice.choice((0, 0, 1, 2))), "calm"]
    return Scenario(
        seed,
        EngineConfig.from_dict(described, where=f"seed {seed}"),
        [tier["inner"]["capacity_bytes"] is None for tier in tiers],  # Others may evict stored chunks.
        documents,
        [_life(dice, documents, ending, number, seed) for number, ending in enumerate(endings)],
    )


def _weighing(seed):
    dice = random.Random(f"weighing {seed}")
    if dice.random() < 0.5:
        return {}
    computing_s = dice.choice((0.002, 0.05, 0.5))  # A chunk; devices take from nothing to 0.3 s and more.
    return {
        "prefill_tokens_per_s": 1 / computing_s,
        "namespace": {"model_name": "default", "tokens_per_hash": 1},
        "late_margin": dice.choice((1.0, 1.5, 4.0)),
    }


def _documents(dice):
    shared = dice.randint(0, 3)
    return [
        [_key(0 if index < shared else document, index) for index in range(dice.randint(1, DOCUMENT_CHUNKS_MAX))]
        for document in range(1, dice.randint(3, 8))
    ]


def _key(document, index):
    return make_offload_key(document.to_bytes(4, "big") + index.to_bytes(4, "big") + bytes(24))


def _tier(dice, seed, index):
    deadline_s = dice.choice((0.5, 2.0, 10.0))
    limits = {
        "deadline_s": deadline_s,
        "load_bytes_in_flight": dice.choice((2, 4_096)) * ROW_BYTES,
        "store_chunks_in_flight": dice.choice((2, 4_096)),
        "breaker_failures": dice.choice((1, 3)),
        "breaker_cooldown_s": dice.choice((0.0, 1.0)),
        "answer_ttl_s": dice.choice((0.001, 0.5, 5.0)),
    }
    device = _device(dice, seed, index)
    moments = ("store", "store", "evict", "evict", "second_use")
    return {
        "type": WITNESS, "name": f"tier{index}", "book": book_name(seed, index), "deadline_s": deadline_s,
        "inner": device, "faults": _faults(dice, deadline_s), "seed": seed, "limits": limits,
        "cascade": random.Random(f"cascade of seed {seed}, tier {index}").choice(moments),
        "medium": dice.choice((None, "CPU", "STORAGE")),
        "locality": dice.choice((None, "LOCAL", "REMOTE")),
    }  # fmt: skip


def book_name(seed, index):
    return f"seed {seed}, tier {index}"


def _device(dice, seed, index):
    return {
        "type": "dummy",
        "store": f"simulation: seed {seed}, tier {index}",
        "latency_s": dice.choice((0.0, 0.001, 0.05, 0.3)),
        "bandwidth_bytes_per_s": dice.choice((None, 40 * ROW_BYTES, 4_000 * ROW_BYTES)),
        "concurrency": dice.choice((1, 4)),
        "capacity_bytes": dice.choice((None, None, 3 * ROW_BYTES, 10 * ROW_BYTES)),
        "shared": dice.random() < 0.3,
    }


def _faults(dice, deadline_s):
    if dice.random() < 0.25:
        return {}
    often = dice.choice((0.02, 0.1, 0.4))
    kinds = ("unavailable", "late_unavailable", "delay", "hang", "failed", "missing", "corrupt", "no_space")
    faults = {kind: often for kind in kinds if dice.random() < 0.4}
    faults["delay_s"] = dice.choice((0.01, 1.0, 2 * deadline_s))
    faults["hang_s"] = dice.choice((None, 0.5 * deadline_s, 3 * deadline_s))
    return faults


def _life(dice, documents, ending, number, seed):
    programs = [(_habits(dice), _matchers(dice)) for _ in range(dice.choice((0, 1, 2, 3)))]
    scheduled = dice.choice((0, 2, 8)) if programs else 8
    if scheduled:  # Whoever steps an engine resets it, and nobody beside it.
        programs = [(habits._replace(weights=(*habits.weights[:3], 0)), chosen) for habits, chosen in programs]
    prompts = [
        Prompt(f"life {number}, prompt {index}", _leading_part(dice, documents), dice.uniform(0, 3), _matchers(dice))
        for index in range(scheduled)
    ]
    pace = Pace(
        step_s=dice.choice((0.02, 0.2)),
        running_max=dice.choice((1, 4)),
        prefill_chunks=dice.choice((1, 8)),
        load_s=dice.choice((0.0, 0.1)),
        decode_s=dice.choice((0.0, 0.5)),
        failed_stores=dice.choice((0.0, 0.0, 0.3)),
    )
    resets_s = [dice.uniform(0, 4)] if scheduled and dice.random() < 0.2 else []
    ends_s = dice.uniform(0, 6)
    dice = random.Random(f"seed {seed}, life {number}, crowd")  # In a few lives many calls wait for rows.
    programs += [dice.choice(programs) for _ in range(5)] if programs and dice.random() < 0.15 else []
    dice = random.Random(f"seed {seed}, life {number}, hints")
    share = dice.choice((0.0, 0.3, 1.0))
    programs = [(habits._replace(hints=share), chosen) for habits, chosen in programs]
    prompts = [prompt._replace(hint=some_hint(dice) if dice.random() < share else None) for prompt in prompts]
    return Life(programs, prompts, pace, resets_s, ending, ends_s)


def _habits(dice):
    return Habits(
        operations=dice.randint(3, 16),
        weights=(10, 20, dice.choice((0, 2)), dice.choice((0, 0, 1))),
        cancels=dice.choice((0.0, 0.1, 0.5)),
        hold_s=dice.choice((0.0, 0.5)),
        pause_s=dice.choice((0.0, 0.05, 0.5)),
    )


def _matchers(dice):
    if dice.random() < 0.7:
        return None
    return [TierMatcher(dice.choice((None, "CPU", "STORAGE")), dice.choice((None, "LOCAL", "REMOTE")))]


def _leading_part(dice, documents):
    document = dice.choice(documents)
    return document[: dice.randint(1, len(document))]
