"""A vLLM engine as the tests use it: prompts of token ids in, tokens and hits out."""

import gc
import multiprocessing
import os
import random
import shutil
import sys
import tempfile
from contextlib import suppress
from functools import cache
from multiprocessing import forkserver, resource_tracker, util
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown
from vllm.model_executor.layers import utils as layers
from vllm.model_executor.models import registry
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.engine import utils as engine_processes
from vllm.v1.executor import multiproc_executor
from vllm.v1.worker import cpu_worker  # noqa: F401  # All processes have it by one import.

from kvtier.integrations.vllm.manager import VllmManager
from tests.vllm import heap  # noqa: F401  # After vLLM.
from tests.vllm.models import VOCABULARY

BLOCK_TOKENS = 32
GPU_BLOCKS = 48  # One prompt of 1,000 tokens and half of another: the engine forgets what it computed.
PROMPT_TOKENS = 1_000
PROMPT_HITS = 992  # Of a prompt that was seen: every whole block.
NEW_TOKENS = 8

# Workers beyond one, and engines of other processes, fork from a server that forks from this process: an import of vLLM
# takes longer than all else that most tests do.
multiproc_executor.get_mp_context = engine_processes.get_mp_context = lambda: multiprocessing.get_context("forkserver")
registry._run_in_subprocess = lambda inspect: inspect()  # Another import, for each kind of model.

# Each engine looks for Triton's kernels at every name of every module: half of its start. Once will do until modules
# are added.
_bind_kernels = CpuPlatform.register_triton_kernel_overrides
_bind_kernels_of = cache(lambda modules: _bind_kernels())
CpuPlatform.register_triton_kernel_overrides = classmethod(lambda cls: _bind_kernels_of(len(sys.modules)))


def _multiply_in_float32(layer, remove_weight):
    weight = layer.weight.detach().float()
    layer.cpu_linear = lambda given, _, bias: torch.nn.functional.linear(given.float(), weight, bias).to(given.dtype)


# Elsewhere, products in bfloat16 are most of the tests' time: in float32 they take an eighth of it.
if not torch.cpu._is_avx512_bf16_supported():
    layers.dispatch_cpu_unquantized_gemm = _multiply_in_float32


def start_fork_server():
    resource_tracker.ensure_running()
    with mock.patch.object(util, "spawnv_passfds", _fork):
        forkserver.ensure_running()


def _fork(path, arguments, files):
    if pid := os.fork():
        return pid
    try:
        kept = {0, 1, 2, resource_tracker.getfd(), *files}
        for each in {int(number) for number in os.listdir("/proc/self/fd")} - kept:
            with suppress(OSError):  # The listing's own.
                os.close(each)  # A pipe that this process keeps open tells the server that it runs.
        sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__  # Not pytest's.
        forkserver._forkserver.ensure_running = lambda: None  # Its children use it, too.
        exec(arguments[-1], {})
    finally:
        os._exit(0)


class Answer(NamedTuple):
    tokens: tuple[int, ...]
    cached: int


class Reference(tuple[int, ...]):  # noqa: SLOT001  # Tuples take none.
    """Tokens that are right; an answer may leave them at a near tie, where the batch's shape decides."""

    choices: list[set[int]]
    """The likeliest token of each step, and those that are nearly as likely."""

    def __eq__(self, other):
        if not isinstance(other, tuple) or len(other) != len(self):
            return False
        steps = zip(self, other, self.choices, strict=True)
        return next((token in choices for right, token, choices in steps if token != right), True)

    def __ne__(self, other):
        return not self == other

    __hash__ = tuple.__hash__


def prompts(count, *, tokens=PROMPT_TOKENS, seed=0):
    dice = random.Random(seed)
    return [[dice.randrange(VOCABULARY) for _ in range(tokens)] for _ in range(count)]


def kvtier(disk=None, **changes):
    """Return `kv_connector_extra_config` for kvtier, with an fs tier as it comes if a directory is given."""
    tiers = [] if disk is None else [{"type": "fs", "root": str(disk)}]
    spec = {"spec_name": "KVTierOffloadingSpec", "spec_module_path": "kvtier.integrations.vllm"}
    return spec | {"cpu_bytes_to_use": "64MiB", "secondary_tiers": tiers} | changes


def kvtier_files(disk, *, shared=False, **changes):
    tier = {"type": "fs", "layout": "files", "root": str(disk), "shared": shared}
    return kvtier(None, secondary_tiers=[tier], **changes)


class Engine:
    def __init__(self, model, offloading=None, *, gpu_blocks=GPU_BLOCKS, measured=False, **changes):
        """`measured`: prefill is, by kvtier's own connector; the same prompts then need not have the same hits."""
        if offloading is not None:
            changes["kv_transfer_config"] = KVTransferConfig(
                kv_connector="KVTierConnector" if measured else "OffloadingConnector",
                kv_connector_module_path="kvtier.integrations.vllm" if measured else None,
                kv_role="kv_both",
                kv_connector_extra_config=dict(offloading),
            )
        for name in [name for name, value in changes.items() if value is None]:
            del changes[name]
        arguments: dict[str, Any] = {
            "model": model, "dtype": "bfloat16", "skip_tokenizer_init": True, "enforce_eager": True,
            "enable_prefix_caching": True, "num_gpu_blocks_override": gpu_blocks, "block_size": BLOCK_TOKENS,
            "max_model_len": 1_280, "disable_log_stats": True, "seed": 0,
        }  # fmt: skip
        try:
            self.llm = LLM(**arguments | changes)
        except BaseException:
            ensure_kv_transfer_shutdown()  # Or the next engine of this process would be given this one's connector.
            raise

    @property
    def core(self):
        return self.llm.llm_engine.engine_core.engine_core

    @property
    def connector(self):
        return self.core.scheduler.connector

    @property
    def manager(self):
        return self.connector.scheduler.manager

    @property
    def kvtier(self):
        assert isinstance(self.manager, VllmManager), self.manager
        return self.manager.engine

    @property
    def ledger(self):
        return self.kvtier.ledger

    def answer(self, given, new_tokens=NEW_TOKENS, load_tiers=(), hint=None, salt=None):
        asked = sampling(new_tokens)
        params: dict[str, Any] = {"kv_load_tiers": list(load_tiers)} if load_tiers else {}
        if hint is not None:
            params["kvtier"] = hint
        if params:
            asked.extra_args = {"kv_transfer_params": params}
        salted = {} if salt is None else {"cache_salt": salt}
        outputs = self.llm.generate([{"prompt_token_ids": prompt} | salted for prompt in given], asked, use_tqdm=False)
        return [Answer(tuple(output.outputs[0].token_ids), output.num_cached_tokens) for output in outputs]

    def settle(self):
        """Step until nothing is under way: vLLM defers the last step's stores to the next one."""
        scheduler = self.core.scheduler
        while scheduler.has_requests() or self.connector.has_pending_push_work():
            self.llm.llm_engine.step()

    def close(self):
        self.llm.llm_engine.engine_core.shutdown()
        del self.llm
        gc.collect()

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        self.close()


def sampling(new_tokens=NEW_TOKENS):
    return SamplingParams(temperature=0, ignore_eos=True, detokenize=False, max_tokens=new_tokens)


class Filled(NamedTuple):
    directory: Path
    tokens: dict[tuple[int, ...], tuple[int, ...]]


_filled: dict[str, Filled] = {}
_directories = tempfile.TemporaryDirectory(prefix="kvtier-filled-")


def fill(model, offloading, asked, **changes):
    """Fill a tier's directory with prompts, at least these; return their tokens.

    An engine computes and stores them. Later calls with the same configuration get a copy of its directory.
    """
    (tier,) = offloading["secondary_tiers"]
    root = tier.get("root", tier.get("root_dir"))
    if root is None:
        return computed(model, offloading, asked, **changes)
    name = repr((model, offloading, sorted(changes.items()))).replace(root, "")
    if name in _filled and all(tuple(prompt) in _filled[name].tokens for prompt in asked):
        shutil.copytree(_filled[name].directory, root, dirs_exist_ok=True)
    else:
        answered = computed(model, offloading, asked, **changes)
        copy = shutil.copytree(root, Path(tempfile.mkdtemp(dir=_directories.name), "copy"))
        _filled[name] = Filled(copy, dict(zip(map(tuple, asked), answered, strict=True)))
    return [_filled[name].tokens[tuple(prompt)] for prompt in asked]


def computed(model, offloading, asked, **changes):
    with Engine(model, offloading, **changes) as engine:
        answers = engine.answer(asked)
        engine.settle()
        return tokens(answers)


TIE = 0.13  # Two steps of a bfloat16 logit between 8 and 16: another processor or batch moves it by one.
LIKELY = 5  # Tokens of a step that are compared: three near ties at one step have been seen.
_references: dict[tuple[str, str, int], dict[tuple[int, ...], Reference]] = {}


def right(model, given, new_tokens=NEW_TOKENS, **changes):
    known = _references.setdefault((model, repr(sorted(changes.items())), new_tokens), {})
    missing = [prompt for prompt in given if tuple(prompt) not in known]
    if missing and Path(model).name == "llama" and new_tokens == NEW_TOKENS and not (known or changes):
        # Nearly all that will be asked of it, instead of many starts.
        missing += [prompt for prompt in prompts(8) + prompts(6, seed=1) if prompt not in missing]
    if missing:
        with Engine(model, gpu_blocks=400, **changes) as engine:
            asked = sampling(new_tokens)
            asked.logprobs = LIKELY
            outputs = engine.llm.generate([{"prompt_token_ids": prompt} for prompt in missing], asked, use_tqdm=False)
            for prompt, output in zip(missing, outputs, strict=True):
                known[tuple(prompt)] = reference(output.outputs[0])
    return [known[tuple(prompt)] for prompt in given]


def reference(output):
    found = Reference(output.token_ids)
    found.choices = []
    for step in output.logprobs:
        best = max(each.logprob for each in step.values())
        found.choices.append({token for token, each in step.items() if best - each.logprob < TIE})
    return found


def tokens(answers):
    return [answer.tokens for answer in answers]


def hits(answers):
    return [answer.cached for answer in answers]
