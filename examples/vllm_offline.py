"""vLLM over kvtier, without a server: what the LLM engine forgot comes back from memory, after a restart from disk.

    python examples/vllm_offline.py [MODEL [DIRECTORY]]

Without a MODEL it makes a tiny one with random weights; without a DIRECTORY the file tier gets a temporary one. The
engine has room for one prompt and a half, so that each prompt pushes the one before out of its cache.
"""

import gc
import os
import random
import sys
import tempfile
import time

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # The engine in this process: it starts in seconds.
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB; the number of blocks below is what counts here.
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig

PROMPTS, PROMPT_TOKENS, BLOCK_TOKENS, GPU_BLOCKS = 6, 1_000, 32, 48


def start(model: str, directory: str) -> LLM:
    """Start an LLM engine with a small cache of its own, kvtier's memory behind it, and a directory behind that."""
    return LLM(
        model=model,
        block_size=BLOCK_TOKENS,
        num_gpu_blocks_override=GPU_BLOCKS,
        max_model_len=1_280,
        enforce_eager=True,
        enable_prefix_caching=True,
        kv_transfer_config=KVTransferConfig(
            kv_connector="KVTierConnector",
            kv_role="kv_both",
            kv_connector_extra_config={
                "cpu_bytes_to_use": "64MiB",
                "secondary_tiers": [{"type": "fs", "root": directory, "capacity_bytes": "1GiB"}],
            },
        ),
    )


def ask(engine: LLM, prompts: list[list[int]], what: str) -> list[tuple[int, ...]]:
    """Answer the prompts one after the other; say how many of their tokens did not have to be computed."""
    begun, cached, answers = time.perf_counter(), 0, []
    for prompt in prompts:
        (output,) = engine.generate(
            [{"prompt_token_ids": prompt}], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True), use_tqdm=False
        )
        cached += output.num_cached_tokens
        answers.append(tuple(output.outputs[0].token_ids))
    seconds = time.perf_counter() - begun
    print(f"{what}: {cached:,} of {sum(map(len, prompts)):,} prompt tokens were cached, {seconds:.2f} s")
    return answers


def stop(engine: LLM) -> None:
    """End an LLM engine; what it has stored by then stays on disk."""
    engine.llm_engine.engine_core.shutdown()
    gc.collect()


def main(model: str, directory: str) -> None:
    dice = random.Random(0)
    prompts = [[dice.randrange(1_000) for _ in range(PROMPT_TOKENS)] for _ in range(PROMPTS)]
    engine = start(model, directory)
    first = ask(engine, prompts, "new prompts")
    again = ask(engine, prompts, "the same, from memory")
    stop(engine)
    del engine
    engine = start(model, directory)
    restarted = ask(engine, prompts, "after a restart, from disk")
    stop(engine)
    print("the same answers each time:", first == again == restarted)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        arguments = sys.argv[1:]
        if not arguments:
            from vllm_tiny_model import save_tiny_model

            save_tiny_model(f"{folder}/model")
        disk = arguments[1] if len(arguments) > 1 else f"{folder}/kvtier"
        main(arguments[0] if arguments else f"{folder}/model", disk)
