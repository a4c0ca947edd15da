"""kvtier beside vLLM's own tiering, in the real engine: the same worker, the same prompts, by turns in one process.

    .venv-vllm/bin/python -m tests.benchmarks.engine_beside_vllm [--rounds 5]

Each engine serves, four requests at a time, prompts of 1,000 tokens that are all new; all in host memory; all on disk
only; and a mixture of these. A CPU plays the GPU's part, with a tiny model, so that what is around it weighs as much as
it can. Both use kvtier's worker, since vLLM's refuses to run without a GPU; the rest is each one's own. Runs after
`make test-vllm` has made the environment.
"""

import argparse
import gc
import json
import os
import random
import statistics
import tempfile
import time
from pathlib import Path

os.environ.update({
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false",
} | os.environ)  # fmt: skip  # Its test runs where they are set.

from tests.vllm.engines import Engine, fill, kvtier, prompts, sampling
from tests.vllm.models import llama
from tests.vllm.vllm_tiering import vllm_tiering

AT_ONCE = 4
EACH = 16  # Prompts of a mix.
GPU_BLOCKS = 160  # Room for the requests that run, and little more.
MIXES = ("cold", "cpu", "fs", "mixed")
TIMED = (
    "on_new_request on_request_finished lookup get_load_source prepare_load complete_load touch prepare_store"
    " complete_store on_schedule_end has_pending_work take_events get_stats"
)
MORE_IS_BETTER = {"requests_per_s", "cached_tokens"}


class Stopwatch:
    def __init__(self, manager):
        self.steps = []
        self._spent = self._cpu = 0.0
        for name in TIMED.split():
            setattr(manager, name, self._timed(getattr(manager, name)))

    def _timed(self, method):
        def timed(*args, **named):
            begun, begun_cpu = time.perf_counter(), time.thread_time()
            try:
                return method(*args, **named)
            finally:
                self._cpu += time.thread_time() - begun_cpu
                self._spent += time.perf_counter() - begun

        return timed

    def end_step(self):
        self.steps.append((self._spent, self._cpu))
        self._spent = self._cpu = 0.0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    asked, load_before, rounds = parser.parse_args(), os.getloadavg()[0], {"kvtier": [], "vllm": []}
    with tempfile.TemporaryDirectory() as folder:
        model = llama(Path(folder))
        for number in range(asked.rounds):
            sides = list(rounds)
            for side in sides if number % 2 == 0 else reversed(sides):  # Who begins has the colder machine.
                rounds[side].append(one_round(side, model, Path(folder) / f"{side}-{number}", seed=number))
    print(json.dumps({"rounds": asked.rounds, "load": load_before, "rows": list(compared(rounds))}, indent=1))


def one_round(side, model, disk, *, seed):
    disk.mkdir()
    extra = kvtier(disk) if side == "kvtier" else vllm_tiering(disk)
    seen = prompts(3 * EACH, seed=1_000 + seed)
    on_disk = seen[: 2 * EACH]
    fill(model, extra, on_disk, gpu_blocks=GPU_BLOCKS)
    new = prompts(2 * EACH, seed=2_000 + seed)
    with Engine(model, extra, gpu_blocks=GPU_BLOCKS) as engine:
        gc.collect()
        gc.freeze()  # As vLLM's engine does in a process of its own: else it shows who meets the collector.
        watch = Stopwatch(engine.manager)
        serve(engine, watch, prompts(2, seed=3_000 + seed))  # What is slow only once.
        in_memory = seen[2 * EACH :]
        serve(engine, watch, in_memory)
        serve(engine, watch, prompts(6, seed=4_000 + seed))  # The GPU forgets them.
        mixed = [*new[EACH : EACH + 8], *in_memory[:4], *on_disk[EACH : EACH + 4]]
        random.Random(seed).shuffle(mixed)
        return {
            "cpu": serve(engine, watch, in_memory),
            "fs": serve(engine, watch, on_disk[:EACH]),
            "cold": serve(engine, watch, new[:EACH]),
            "mixed": serve(engine, watch, mixed),
        }


def serve(engine, watch, asked):
    """Answer the prompts, so many at once, and wait until nothing is under way; the wait is not counted."""
    llm_engine, waiting = engine.llm.llm_engine, list(enumerate(asked))
    begun = {}
    first = {}
    cached, running = 0, 0
    watch.steps.clear()
    start = time.perf_counter()
    while waiting or running:
        while waiting and running < AT_ONCE:
            index, prompt = waiting.pop(0)
            begun[str(index)] = time.perf_counter()
            llm_engine.add_request(str(index), {"prompt_token_ids": prompt}, sampling(4))
            running += 1
        for output in llm_engine.step():
            if output.outputs[0].token_ids:
                first.setdefault(output.request_id, time.perf_counter())
            if output.finished:
                running -= 1
                cached += output.num_cached_tokens
        watch.end_step()
    seconds = time.perf_counter() - start
    spent, cpu = map(list, zip(*watch.steps, strict=True))
    engine.settle()
    waits = [first[name] - since for name, since in begun.items()]
    figures = {"ttft_s": waits, "manager_s_per_step": spent, "manager_cpu_s_per_step": cpu}  # CPU: of this thread.
    return {"requests_per_s": len(asked) / seconds, "cached_tokens": cached} | {
        f"{name}_p{percent}": quantile(values, percent / 100)
        for name, values in figures.items()
        for percent in (50, 99)
    }


def quantile(values, share):
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def compared(rounds):
    """Give a row for each mix and figure: both medians, and the median and extremes of the rounds' own ratios."""
    for mix in MIXES:
        for figure in rounds["kvtier"][0][mix]:
            ours, theirs = ([each[mix][figure] for each in rounds[side]] for side in ("kvtier", "vllm"))
            pairs = [(a, b) for a, b in zip(ours, theirs, strict=True) if a and b]
            ratios = [a / b if figure in MORE_IS_BETTER else b / a for a, b in pairs]
            yield {
                "mix": mix,
                "figure": figure,
                "kvtier": statistics.median(ours),
                "vllm": statistics.median(theirs),
                "better_by": [of(ratios) for of in (statistics.median, min, max)] if ratios else None,
            }


if __name__ == "__main__":
    main()
