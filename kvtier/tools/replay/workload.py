"""A workload from a seed: chats and agents that share system prompts, for demonstrations and tests without a trace.

Many sessions share system prompts with Zipf's popularity, each prompt of a session contains the one before and its
reply, and lengths have heavy tails, as lognormal distributions. Left out: retries, branching and shortened histories,
load that changes with the hour, and users who share documents. Sources of the defaults:

- `chat`: Mooncake's `conversation_trace` (Qin et al., "Mooncake: Trading More Storage for Less Computation", USENIX
  FAST 2025; 12,031 requests of one hour), where a prompt that shares more than its first block with an earlier one
  counts as its next turn.
- `agents`: pauses, replies and tool results from the coding agents of kv-cache-tester (Callan Fox / WEKA, commit
  94f6046d; 47,972 requests); turns and first prompts from lmcache-agent-trace (LMCache, commit 16a14ada; 20 runs).
- `arrival_cv`: bursty session starts from a Gamma distribution as in BurstGPT (Wang et al., arXiv 2401.17644).
- Our choice: the value of `arrival_cv`, the system prompts, and the share of agents.

12,000 requests of chats alone have 7,505 sessions in 3,752 s (the real trace 7,373 in 3,537 s), prompts of 12,941
tokens on average (12,035), a best possible hit ratio of 0.400 (0.366), and one of 0.241 (0.196) in an LRU cache of 5 %
of the unique blocks.
"""

import heapq
import math
import random
from collections.abc import Iterator, Mapping
from itertools import accumulate, count, islice
from typing import Any

import msgspec
from msgspec.structs import replace

from kvtier.tools.replay.traces import BLOCK_TOKENS, Trace, TraceRequest

GENERATED = "generated"


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """A lognormal distribution, cut off: half lies below `median`, two thirds within a factor of e**sigma of it."""

    median: float
    sigma: float
    most: float

    def draw(self, source: random.Random) -> float:
        return min(self.most, self.median * math.exp(self.sigma * source.gauss(0.0, 1.0)))

    def draw_count(self, source: random.Random) -> int:
        return max(1, round(self.draw(source)))


class Dialogue(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of session. Lengths are in tokens."""

    system_prompts: int
    system_prompt_zipf: float  # Popularity of the n-th most popular: proportional to n ** -zipf.
    system_prompt_tokens: Spread
    turns: Spread
    first_tokens: Spread  # Of the first prompt, after the system prompt.
    later_tokens: Spread  # Of a later prompt, after the prompt and the reply before: a question, a tool's result.
    reply_tokens: Spread
    pause_s: Spread  # From a prompt to the next one of the session: decoding, and a person or a tool.


CHAT = Dialogue(
    system_prompts=16,
    system_prompt_zipf=1.0,
    system_prompt_tokens=Spread(median=600, sigma=0.8, most=8_000),
    turns=Spread(median=1, sigma=0.9, most=50),
    first_tokens=Spread(median=5_000, sigma=1.3, most=120_000),
    later_tokens=Spread(median=60, sigma=2.5, most=50_000),
    reply_tokens=Spread(median=300, sigma=0.6, most=2_000),
    pause_s=Spread(median=123, sigma=1.1, most=3_600),
)

AGENTS = Dialogue(
    system_prompts=4,
    system_prompt_zipf=1.0,
    system_prompt_tokens=Spread(median=4_000, sigma=0.5, most=16_000),
    turns=Spread(median=25, sigma=0.6, most=100),
    first_tokens=Spread(median=1_800, sigma=0.5, most=20_000),
    later_tokens=Spread(median=275, sigma=1.85, most=16_000),
    reply_tokens=Spread(median=218, sigma=1.05, most=8_000),
    pause_s=Spread(median=17, sigma=1.4, most=1_900),
)


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """A workload to generate. The same one is always the same requests."""

    requests: int = 3_000
    seed: int = 0
    block_tokens: int = BLOCK_TOKENS
    context_tokens_max: int = 131_072  # A session ends rather than ask for more.
    sessions_per_s: float = 2.0
    arrival_cv: float = 2.0  # Standard deviation over mean of the time between session starts; 1: Poisson.
    agent_share: float = 0.05  # Of sessions; of 3,000 requests 0.31 are theirs, of 48,000 0.46.
    chat: Dialogue = CHAT
    agents: Dialogue = AGENTS


class GeneratedTrace:
    """A workload's requests as a trace; each iteration generates them again."""

    path = GENERATED

    def __init__(self, workload: Workload | None = None, *, limit: int | None = None) -> None:
        """Take `limit` requests, fewer or more than the workload has."""
        workload = workload or Workload()
        self.workload = workload = workload if limit is None else replace(workload, requests=limit)
        self.block_tokens = workload.block_tokens
        self.meta: Mapping[str, Any] = {"block_size": workload.block_tokens, "workload": msgspec.to_builtins(workload)}

    def __iter__(self) -> Iterator[TraceRequest]:
        return generate(self.workload)


AnyTrace = Trace | GeneratedTrace


def open_trace(name: str, *, seed: int = 0, limit: int | None = None) -> AnyTrace:
    """Return the trace of a file, or the workload of a seed for `generated`. Raises `TraceError`."""
    return GeneratedTrace(Workload(seed=seed), limit=limit) if name == GENERATED else Trace(name, limit=limit)


def generate(workload: Workload) -> Iterator[TraceRequest]:
    """Yield the requests in the order of their arrival, the first at 0 ms.

    As in Mooncake's traces `len(hash_ids) == ceil(input_length / block_tokens)`: a last block that is only partly
    filled has an id, which never comes again.
    """
    source = random.Random(workload.seed)
    ids = count()
    kinds = [_SessionKind(dialogue, workload, source, ids) for dialogue in (workload.chat, workload.agents)]
    live: list[tuple[float, _Session]] = []  # A heap: when each session asks next.
    start_s, sessions, variance = 0.0, 0, workload.arrival_cv**2
    for _ in range(workload.requests):
        while not live or start_s <= live[0][0]:
            heapq.heappush(live, (start_s, _Session(kinds[source.random() < workload.agent_share], sessions)))
            sessions += 1
            start_s += source.gammavariate(1 / variance, variance / workload.sessions_per_s)
        now_s, session = live[0]
        yield session.ask(now_s)
        if session.ended:
            heapq.heappop(live)
        else:
            heapq.heapreplace(live, (now_s + session.kind.dialogue.pause_s.draw(source), session))


class _SessionKind:
    def __init__(self, dialogue: Dialogue, workload: Workload, source: random.Random, ids: Iterator[int]) -> None:
        self.dialogue = dialogue
        self.workload = workload
        self.source = source
        self.ids = ids
        tokens = [dialogue.system_prompt_tokens.draw_count(source) for _ in range(dialogue.system_prompts)]
        self._prompts = [(size, list(islice(ids, size // workload.block_tokens))) for size in tokens]
        ranks = range(1, dialogue.system_prompts + 1)
        self._popularity = list(accumulate(rank**-dialogue.system_prompt_zipf for rank in ranks))

    def draw_system_prompt(self) -> tuple[int, list[int]]:
        """Return a system prompt's length in tokens and the ids of its whole blocks."""
        return self.source.choices(self._prompts, cum_weights=self._popularity)[0]


class _Session:
    """One dialogue in progress: the prompt that it sends next, and the ids of all blocks that are settled."""

    def __init__(self, kind: _SessionKind, number: int) -> None:
        self.kind = kind
        self._number = number
        system_tokens, system_blocks = kind.draw_system_prompt()
        first_tokens = kind.dialogue.first_tokens.draw_count(kind.source)
        self._turns_left = kind.dialogue.turns.draw_count(kind.source)
        self._prompt_tokens = min(system_tokens + first_tokens, kind.workload.context_tokens_max)
        self._blocks = system_blocks[: self._prompt_tokens // kind.workload.block_tokens]

    def __lt__(self, other: "_Session") -> bool:
        """Of sessions that ask at the same instant, the older asks first."""
        return self._number < other._number

    @property
    def ended(self) -> bool:
        return self._turns_left == 0 or self._prompt_tokens > self.kind.workload.context_tokens_max

    def ask(self, now_s: float) -> TraceRequest:
        kind, prompt_tokens = self.kind, self._prompt_tokens
        whole, rest = divmod(prompt_tokens, kind.workload.block_tokens)
        self._blocks += islice(kind.ids, whole - len(self._blocks))
        partly_filled = (next(kind.ids),) if rest else ()
        reply_tokens = kind.dialogue.reply_tokens.draw_count(kind.source)
        self._prompt_tokens += reply_tokens + kind.dialogue.later_tokens.draw_count(kind.source)
        self._turns_left -= 1
        return TraceRequest(
            timestamp_ms=int(now_s * 1_000),
            input_length=prompt_tokens,
            output_length=reply_tokens,
            hash_ids=(*self._blocks, *partly_filled),
            session_id=self._number,
        )
