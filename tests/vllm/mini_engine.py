"""vLLM's own scheduler and connector around a model that is a hash: all that runs of its Python files alone.

    PYTHONPATH=SOURCES:KVTIER VLLM_CACHE_ROOT=EMPTY python mini_engine.py MODEL DISK

prints as JSON what that version says of kvtier, in one process: an import takes longer than all that is asked.

Everything on kvtier's side of the boundary is called by vLLM's code: `Scheduler`, `OffloadingConnector` in both roles.
The model writes, into each KV block that is full, bytes that follow from the tokens up to its end: a block that came
from a tier is right if it holds just these bytes.
"""

import hashlib
import json
import os
import random
import sys
import warnings
from functools import partial
from typing import Any

os.environ.update(VLLM_LOGGING_LEVEL="ERROR", VLLM_CPU_KVCACHE_SPACE="1", HF_HUB_OFFLINE="1")
warnings.simplefilter("ignore")

import prometheus_client  # noqa: E402
import torch  # noqa: E402
import vllm  # noqa: E402
import vllm.platforms  # noqa: E402
from vllm.platforms.cpu import CpuPlatform  # noqa: E402

vllm.platforms.current_platform = CpuPlatform()  # Without its compiled part vLLM does not know where it is.

from vllm import SamplingParams  # noqa: E402
from vllm.config import KVTransferConfig  # noqa: E402
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole  # noqa: E402
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadPromMetrics  # noqa: E402
from vllm.engine.arg_utils import EngineArgs  # noqa: E402
from vllm.model_executor.models import registry  # noqa: E402
from vllm.utils.hashing import sha256  # noqa: E402
from vllm.v1.core import kv_cache_utils  # noqa: E402
from vllm.v1.core.sched.scheduler import Scheduler  # noqa: E402
from vllm.v1.engine import core  # noqa: E402  # Where to find what has moved from version to version.
from vllm.v1.kv_cache_interface import FullAttentionSpec  # noqa: E402
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput  # noqa: E402
from vllm.v1.request import Request  # noqa: E402
from vllm.v1.structured_output import StructuredOutputManager  # noqa: E402

from kvtier.integrations.vllm import KVTierConnector  # noqa: E402
from tests.vllm.calls import told_of_failed_stores  # noqa: E402

registry._run_in_subprocess = lambda inspect: inspect()  # Another import.
BLOCK_TOKENS, HEADS, HEAD_DIM, LAYERS = 32, 4, 32, 4


class MiniEngine:
    def __init__(self, model, extra, blocks):
        self.config = EngineArgs(
            model=model,
            dtype="bfloat16",
            skip_tokenizer_init=True,
            enforce_eager=True,
            block_size=BLOCK_TOKENS,
            max_model_len=1_280,
            num_gpu_blocks_override=blocks,
            kv_transfer_config=KVTransferConfig(
                kv_connector="KVTierConnector",
                kv_connector_module_path="kvtier.integrations.vllm",
                kv_role="kv_both",
                kv_connector_extra_config=extra,
            ),
        ).create_engine_config()
        self.config.cache_config.kv_cache_layout = "LBHNC"
        layers = [f"model.layers.{index}.self_attn.attn" for index in range(LAYERS)]
        spec = FullAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=HEADS, head_size=HEAD_DIM, dtype=torch.bfloat16)
        specs = [dict.fromkeys(layers, spec)]
        groups = () if vllm.__version__.startswith("0.32.") else (core.get_global_kv_cache_groups(self.config, specs),)
        (caches,) = core.get_kv_cache_configs(self.config, specs, [1 << 30], *groups)
        self.config.cache_config.num_gpu_blocks = blocks = caches.num_blocks
        memory = torch.zeros(LAYERS, blocks, HEADS, BLOCK_TOKENS, 2 * HEAD_DIM, dtype=torch.bfloat16)
        self.memory = memory.view(torch.int8).view(LAYERS, blocks, -1)
        self.worker = KVTierConnector(self.config, KVConnectorRole.WORKER, caches)
        self.worker.register_kv_caches({layer: memory[index] for index, layer in enumerate(layers)})
        scheduled = kv_cache_utils.generate_scheduler_kv_cache_config([caches])
        block_size, hash_size = kv_cache_utils.resolve_kv_cache_block_sizes(scheduled, self.config)
        self.scheduler = Scheduler(
            vllm_config=self.config,
            kv_cache_config=scheduled,
            structured_output_manager=StructuredOutputManager(self.config),
            block_size=block_size,
            hash_block_size=hash_size,
        )
        kv_cache_utils.init_none_hash(sha256)
        self.hasher = kv_cache_utils.get_request_block_hasher(hash_size, sha256)
        self.tables: dict[str, list[int]] = {}
        self.wrong_blocks = 0
        self.stats: list[Any] = []
        self.cached: dict[str, int] = {}

    def answer(self, prompts, name):
        requests = [
            Request(f"{name}-{index}", prompt, sampling(), None, block_hasher=self.hasher)
            for index, prompt in enumerate(prompts)
        ]
        for request in requests:
            self.scheduler.add_request(request)
        open_requests = {request.request_id: request for request in requests}
        while self.scheduler.has_requests() or self.scheduler.connector.has_pending_push_work():
            self.step(open_requests)
        return [self.cached[request.request_id] for request in requests]

    def step(self, requests):
        output, connector_output = self.scheduler.schedule(), KVConnectorOutput()
        self.worker.bind_connector_metadata(output.kv_connector_metadata)
        self.worker.handle_preemptions(output.kv_connector_metadata)
        self.worker.start_load_kv(None)
        tokens = self.run_model(output, requests)
        self.worker.wait_for_save()
        _, connector_output.finished_recving = self.worker.get_finished(output.finished_req_ids)
        connector_output.kv_connector_worker_meta = self.worker.build_connector_worker_meta()
        self.worker.clear_connector_metadata()
        ids = list(output.num_scheduled_tokens)
        if stats := self.scheduler.connector.get_kv_connector_stats():
            self.stats.append(stats)
        self.scheduler.update_from_output(
            output,
            ModelRunnerOutput(
                req_ids=ids,
                req_id_to_index={each: index for index, each in enumerate(ids)},
                sampled_token_ids=[tokens[each] for each in ids],
                kv_connector_output=connector_output,
            ),
        )

    def run_model(self, output, requests):
        """Write what is computed in this step, check what was not, and answer with one token where a prompt is done."""
        for new in output.scheduled_new_reqs:
            self.tables[new.req_id] = list(new.block_ids[0])
            self.cached[new.req_id] = new.num_computed_tokens
            self.check(new.req_id, requests[new.req_id], new.num_computed_tokens)
        cached = output.scheduled_cached_reqs
        for request_id, block_ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
            self.tables[request_id] += [] if block_ids is None else block_ids[0]
        answers: dict[str, list[int]] = {}
        for request_id, count in output.num_scheduled_tokens.items():
            request = requests[request_id]
            begin = request.num_computed_tokens - count
            for block in range(begin // BLOCK_TOKENS, (begin + count) // BLOCK_TOKENS):
                self.memory[:, self.tables[request_id][block]] = block_bytes(request.all_token_ids, block)
            done = begin + count >= request.num_prompt_tokens
            answers[request_id] = [len(request.all_token_ids) % 1_000] if done else []
        return answers

    def check(self, request_id, request, computed):
        for block in range(computed // BLOCK_TOKENS):
            held = self.memory[:, self.tables[request_id][block]]
            self.wrong_blocks += not torch.equal(held, block_bytes(request.all_token_ids, block))

    def close(self):
        self.worker.shutdown()
        self.scheduler.shutdown()


def block_bytes(tokens, block):
    seed = hashlib.sha256(repr(list(tokens[: (block + 1) * BLOCK_TOKENS])).encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(seed[:7], "big"))
    size = HEADS * BLOCK_TOKENS * 2 * HEAD_DIM * 2
    return torch.randint(-128, 128, (LAYERS, size), dtype=torch.int8, generator=generator)


def sampling():
    return SamplingParams(temperature=0, ignore_eos=True, detokenize=False, max_tokens=4)


def doors(disk):
    tier = {"type": "KVTierSecondaryTier", "module_path": "kvtier.integrations.vllm", "backend": "fs", "root": disk}
    return {
        "first": {
            "spec_name": "KVTierOffloadingSpec",
            "spec_module_path": "kvtier.integrations.vllm",
            "cpu_bytes_to_use": "64MiB",
            "secondary_tiers": [{"type": "fs", "root": disk}],
            "prefill_tokens_per_s": 1.0,  # So that whatever a tier has is loaded.
        },
        "second": {
            "spec_name": "TieringOnCpu",
            "spec_module_path": "tests.vllm.vllm_tiering",
            "cpu_bytes_to_use": 64 << 20,
            "secondary_tiers": [tier],
        },
    }


def exposition(engine):
    kinds = (prometheus_client.Counter, prometheus_client.Gauge, prometheus_client.Histogram)
    registry = prometheus_client.CollectorRegistry()
    made = {kind: partial(kind, registry=registry) for kind in kinds}
    metrics = OffloadPromMetrics(engine.config, made, ["engine"], {0: ["0"]})
    for stats in engine.stats:
        metrics.observe(stats.data)
    return prometheus_client.generate_latest(registry).decode()


def run(model, disk, door):
    dice = random.Random(0)
    prompts = [[dice.randrange(1_024) for _ in range(1_000)] for _ in range(4)]
    report: dict[str, Any] = {"hits": {}, "wrong_blocks": 0}
    for turn in ("new", "restarted"):
        engine = MiniEngine(model, doors(disk)[door], blocks=48)
        for name in ("cold", "warm"):
            report["hits"][f"{turn} {name}"] = engine.answer(prompts, f"{turn}-{name}")
        engine.scheduler.reset_prefix_cache(reset_connector=True)
        report["hits"][f"{turn} reset"] = engine.answer(prompts, f"{turn}-reset")
        report["wrong_blocks"] += engine.wrong_blocks
        if turn == "restarted":
            report["metrics"] = exposition(engine)
        engine.close()
    return report


def prefill_noted(model, disk):
    """Ask an engine whose prefill nobody has said the speed of; return the tokens that kvtier notes, step by step."""
    extra = {name: value for name, value in doors(disk)["first"].items() if name != "prefill_tokens_per_s"}
    engine = MiniEngine(model, extra, blocks=48)
    kvtier = engine.scheduler.connector.scheduler.manager.engine
    noted: list[int] = []
    kvtier.note_prefill = lambda tokens, seconds: noted.append(tokens if seconds > 0 else -1)
    engine.answer([[number] * 1_000 for number in range(3)], "new")
    engine.close()
    return noted


def main(model, disk):
    return {
        "version": vllm.__version__,
        "failed stores": told_of_failed_stores(),
        "prefill noted": prefill_noted(model, f"{disk}/noted"),
        "doors": {door: run(model, f"{disk}/{door}", door) for door in ("first", "second")},
    }


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
