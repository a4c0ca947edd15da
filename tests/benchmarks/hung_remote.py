"""The real vLLM's steps while the service of a shared tier hangs, beside its steps without that tier, by turns.

    .venv-vllm/bin/python -m tests.benchmarks.hung_remote [--rounds 5] [--json FILE]

Each round has one engine without a tier behind its memory and one with a `redis` tier whose server is stopped (SIGSTOP)
once the engine runs. Both serve, four at a time, the same new prompts of 1,000 tokens, with at most 512 tokens a step:
so a full step is the same work on both sides. Steps that computed nothing (a request waits for the tier) are shown
apart. A CPU plays the GPU's part. Runs after `make test-vllm` has made the environment.
"""

import argparse
import gc
import json
import os
import signal
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from tests.benchmarks.engine_beside_vllm import quantile
from tests.redis.servers import RedisServer
from tests.vllm.engines import Engine, Prompt, kvtier, prompts, sampling
from tests.vllm.models import llama

AT_ONCE = 4
EACH = 24  # Prompts of a round and side.
NEW_TOKENS = 16
STEP_TOKENS = 512
GPU_BLOCKS = 200
TIMEOUT_S = 1.0  # What the tier waits for its server.
LIMITS = {"deadline_s": 2.0, "breaker_cooldown_s": 1.0}
SIDES = ("alone", "hung")
FIGURES = (
    "step_s_p50",
    "step_s_p99",
    "step_s_max",
    "step_cpu_s_p99",
    "step_cpu_s_max",
    "idle_step_s_p99",
    "request_s_max",
)


class Step(NamedTuple):
    """What one step took, of the wall clock and of the scheduler's thread."""

    seconds: float
    cpu_s: float
    tokens: int


class Served(NamedTuple):
    """What serving the prompts took."""

    steps: list[Step]
    request_s: list[float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    load_before = os.getloadavg()[0]
    served: dict[str, list[Served]] = {side: [] for side in SIDES}
    with tempfile.TemporaryDirectory() as folder:
        model = llama(Path(folder))
        for number in range(asked.rounds):
            for side in SIDES if number % 2 == 0 else reversed(SIDES):  # Who begins has the colder machine.
                served[side].append(one_round(side, model, Path(folder), seed=number))
    figures = {side: [figures_of(each) for each in rounds] for side, rounds in served.items()}
    show(figures, asked.rounds, load_before)
    if asked.json:
        asked.json.write_text(json.dumps({"rounds": asked.rounds, "load": load_before, **figures}, indent=1))


def one_round(side: str, model: str, folder: Path, *, seed: int) -> Served:
    server = RedisServer(folder).start()
    tier = {"type": "redis", "url": f"redis://{server.address}", "timeout_s": TIMEOUT_S, "limits": LIMITS}
    extra = kvtier(secondary_tiers=[tier] if side == "hung" else [])
    try:
        with Engine(model, extra, gpu_blocks=GPU_BLOCKS, max_num_batched_tokens=STEP_TOKENS) as engine:
            gc.collect()
            gc.freeze()  # As vLLM's engine does in a process of its own: else it shows who meets the collector.
            serve(engine, prompts(4, seed=1_000 + seed))  # What is slow only once.
            server.signal(signal.SIGSTOP)
            return serve(engine, prompts(EACH, seed=2_000 + seed))
    finally:
        server.kill()


def serve(engine: Engine, asked: list[Prompt]) -> Served:
    """Answer the prompts, so many at once."""
    llm, scheduler = engine.llm.llm_engine, engine.core.scheduler
    scheduled = watch_tokens(scheduler)
    waiting = list(enumerate(asked))
    begun: dict[str, float] = {}
    served = Served([], [])
    running = 0
    while waiting or running:
        while waiting and running < AT_ONCE:
            index, prompt = waiting.pop(0)
            begun[str(index)] = time.perf_counter()
            llm.add_request(str(index), {"prompt_token_ids": prompt}, sampling(NEW_TOKENS))
            running += 1
        since, since_cpu = time.perf_counter(), time.thread_time()
        outputs = llm.step()
        served.steps.append(Step(time.perf_counter() - since, time.thread_time() - since_cpu, scheduled[-1]))
        for output in outputs:
            if output.finished:
                running -= 1
                served.request_s.append(time.perf_counter() - begun[output.request_id])
    del scheduler.schedule
    engine.settle()
    return served


def watch_tokens(scheduler: Any) -> list[int]:
    """Collect how many tokens each step has; `del scheduler.schedule` ends it."""
    schedule, tokens = scheduler.schedule, [0]

    def noted(*given: Any, **named: Any) -> Any:
        output = schedule(*given, **named)
        tokens.append(output.total_num_scheduled_tokens)
        return output

    scheduler.schedule = noted
    return tokens


def figures_of(served: Served) -> dict[str, float]:
    working = [step for step in served.steps if step.tokens]
    idle = [step.seconds for step in served.steps if not step.tokens]
    seconds, cpu = [step.seconds for step in working], [step.cpu_s for step in working]
    values = (
        statistics.median(seconds),
        quantile(seconds, 0.99),
        max(seconds),
        quantile(cpu, 0.99),
        max(cpu),
        quantile(idle, 0.99) if idle else 0.0,
        max(served.request_s),
    )
    return dict(zip(FIGURES, values, strict=True))


def show(figures: dict[str, list[dict[str, float]]], rounds: int, load: float) -> None:
    """Print both sides' medians, the median and extremes of the rounds' ratios, and the bar."""
    table = Table(title=f"{rounds} rounds by turns, medians; load {load:.1f} at the start. Below 1: no slower for it.")
    for name in ("figure", "alone", "hung", "ratio", "least", "most"):
        table.add_column(name, justify="left" if name == "figure" else "right")
    for figure in FIGURES:
        alone, hung = ([each[figure] for each in figures[side]] for side in SIDES)
        row(table, figure, alone, hung)
    p99 = [each["step_s_p99"] for each in figures["alone"]]
    row(table, "longest step beside p99 alone", p99, [each["step_s_max"] for each in figures["hung"]])
    row(table, "the same without the tier", p99, [each["step_s_max"] for each in figures["alone"]])
    Console(width=120).print(table)


def row(table: Table, name: str, alone: list[float], hung: list[float]) -> None:
    ratios = [b / a for a, b in zip(alone, hung, strict=True) if a] or [0.0]
    values = (statistics.median(alone), statistics.median(hung), statistics.median(ratios), min(ratios), max(ratios))
    table.add_row(name, *(f"{value:.4g}" for value in values))


if __name__ == "__main__":
    main()
