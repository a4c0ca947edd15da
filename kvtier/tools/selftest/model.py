"""A transformer that serves prompts from a paged KV cache which kvtier tiers: what a hit saves, and the same tokens.

The shape is a real model's. The weights are random, because times do not depend on them. Prompts are computed in two
steps: all whole blocks but the last, and then the rest. The KV of the first step was computed, loaded from cpu, or
promoted from fs. The second step is the same in all three, to the bit: its logits must be equal, not almost.
"""

import math
import os
import random
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from hashlib import sha256
from typing import NamedTuple

import torch
from msgspec.structs import replace
from torch.nn import functional

from kvtier.backend import OffloadKey, make_offload_key
from kvtier.config import EngineConfig
from kvtier.engine.answers import LookupResult
from kvtier.engine.steps import StepManager
from kvtier.kvcache.layout import FullAttentionSpec, allocate_tensors, canonical_kv_caches, group_layers
from kvtier.kvcache.layout.axes import KV_JOINED_NHD
from kvtier.kvcache.transfer import Direction, GroupBlocks, TransferWorker, slot_layout
from kvtier.memory import Region
from kvtier.settings import shown_bytes
from kvtier.tools.bench.copies import Case, host_memory, plain_copy
from kvtier.tools.bench.raw import RawFile, takes_direct
from kvtier.tools.selftest.checks import WAIT_S, see_through
from kvtier.tools.selftest.device import Device, NotHere, Wrong
from kvtier.tools.selftest.report import FirstToken

BLOCK_TOKENS = 16
TOKENS_AFTER = 16  # Generated, and compared.
STORED_AT_ONCE_BYTES = 128 << 20  # Half of what a tier has in flight: no cascade is dropped.
STEP_S = 0.001  # An LLM engine's other work between two look-ups; its steps take longer.
PROMOTION_S = 300.0
RAW_BYTES = {"cuda": 256 << 20, "cpu": 16 << 20}  # Read from the disk beside, and copied, to know the rates.
RAW_CHUNK_BYTES = 2 << 20
RAW_THREADS = 4  # As many as a tier has by default.
ROOM = 1.5  # Of the longest prompt's KV, on the disk: for what the shorter ones left, and the file beside it.
ROPE_BASE = 500_000.0
SPARE_SHARE = 0.6  # Of a device's memory, for weights and both sets of blocks: the rest is what a prompt takes.


class Shape(NamedTuple):
    """The shape of a transformer with grouped-query attention, and the prompts that it is asked."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    feed_forward: int
    vocabulary: int
    prompts: tuple[int, ...]
    rounds: int

    @property
    def weights_bytes(self) -> int:
        attention = self.hidden * self.head_size * 2 * (self.heads + self.kv_heads)
        return 2 * (self.layers * (attention + 3 * self.hidden * self.feed_forward) + 2 * self.vocabulary * self.hidden)

    @property
    def token_bytes(self) -> int:
        """Bytes of KV that a token has."""
        return self.layers * self.kv_heads * self.head_size * 2 * 2


PROMPTS = (2_048, 8_192, 32_768)
TINY = Shape("2 layers of 64, random weights, bf16", 2, 64, 4, 2, 16, 128, 256, (64, 128, 256), 2)
ONE_B = Shape("the shape of Llama 3.2 1B, random weights, bf16", 16, 2_048, 32, 8, 64, 8_192, 32_000, PROMPTS, 3)
EIGHT_B = Shape("the shape of Llama 3.1 8B, random weights, bf16", 32, 4_096, 32, 8, 128, 14_336, 32_000, PROMPTS, 3)


def shape_for(device: Device) -> Shape:
    """Return the largest shape that fits on the device."""
    if device.name == "cpu":
        return TINY
    free, _ = torch.cuda.mem_get_info(device.place)
    needed = EIGHT_B.weights_bytes + 2 * max(EIGHT_B.prompts) * EIGHT_B.token_bytes
    return EIGHT_B if needed <= SPARE_SHARE * free else ONE_B


class PagedCache:
    """The KV of all layers, in blocks: a tensor for each layer, as an LLM engine has them."""

    def __init__(self, shape: Shape, blocks: int, place: torch.device) -> None:
        spec = FullAttentionSpec(
            block_size=BLOCK_TOKENS, num_kv_heads=shape.kv_heads, head_size=shape.head_size, dtype=torch.bfloat16
        )
        names = [f"layers.{layer}" for layer in range(shape.layers)]
        config, axes = group_layers(dict.fromkeys(names, spec), blocks), dict.fromkeys(names, KV_JOINED_NHD)
        caches = allocate_tensors(config, axes, place)
        self.canonical = canonical_kv_caches(config, caches, axes)
        self._layers = [_tensor(caches[name]) for name in names]  # Each (blocks, heads, tokens, 2 x head size).

    def write(self, layer: int, blocks: torch.Tensor, start: int, keys_values: torch.Tensor) -> None:
        """Write (tokens, heads, 2 x head size) of the tokens from `start` on."""
        places = torch.arange(start, start + len(keys_values), device=keys_values.device)
        self._layers[layer][blocks[places // BLOCK_TOKENS], :, places % BLOCK_TOKENS] = keys_values

    def read(self, layer: int, blocks: torch.Tensor, tokens: int) -> torch.Tensor:
        """Read (tokens, heads, 2 x head size)."""
        paged = self._layers[layer][blocks[: -(-tokens // BLOCK_TOKENS)]]
        return paged.permute(0, 2, 1, 3).flatten(0, 1)[:tokens]


def _tensor(cache: object) -> torch.Tensor:
    assert isinstance(cache, torch.Tensor)
    return cache


class Transformer:
    """Layers of attention over a paged cache, and of a gated feed-forward."""

    def __init__(self, shape: Shape, place: torch.device, seed: int = 0) -> None:
        self.shape, self.place = shape, place
        generator = torch.Generator(place).manual_seed(seed)

        def weights(rows: int, columns: int) -> torch.Tensor:
            made = torch.empty((rows, columns), dtype=torch.bfloat16, device=place)
            return made.normal_(0, 1 / math.sqrt(rows), generator=generator)

        inner, outer = shape.heads * shape.head_size, shape.kv_heads * shape.head_size
        self._embedding = weights(shape.vocabulary, shape.hidden).mul_(math.sqrt(shape.vocabulary))
        self._layers = [
            (
                weights(shape.hidden, inner + 2 * outer),
                weights(inner, shape.hidden),
                weights(shape.hidden, 2 * shape.feed_forward),
                weights(shape.feed_forward, shape.hidden),
            )
            for _ in range(shape.layers)
        ]
        self._head = weights(shape.hidden, shape.vocabulary)
        powers = torch.arange(0, shape.head_size, 2, device=place, dtype=torch.float32) / shape.head_size
        self._frequencies = ROPE_BASE**-powers

    @torch.inference_mode()
    def run(self, tokens: Sequence[int], start: int, cache: PagedCache, blocks: torch.Tensor) -> torch.Tensor:
        """Compute tokens from `start` on, write their KV, and return the logits after the last one."""
        flow = self._embedding[torch.tensor(tokens, device=self.place)]
        turns = self._turns(start, len(tokens))
        for layer, (into_heads, out_of_heads, up, down) in enumerate(self._layers):
            queries, keys_values = self._heads(_normed(flow) @ into_heads, turns)
            cache.write(layer, blocks, start, keys_values)
            seen = cache.read(layer, blocks, start + len(tokens)) if start else keys_values
            flow = flow + self._attend(queries, seen, start).flatten(1) @ out_of_heads
            gate, value = (_normed(flow) @ up).chunk(2, dim=-1)
            flow = flow + (functional.silu(gate) * value) @ down
        return _normed(flow[-1:])[0] @ self._head

    def _turns(self, start: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        positions = torch.arange(start, start + count, device=self.place, dtype=torch.float32)
        angles = torch.outer(positions, self._frequencies)[:, None]
        return angles.cos(), angles.sin()

    def _heads(self, flow: torch.Tensor, turns: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return queries (tokens, heads, size), and keys with values (tokens, KV heads, 2 x size), all in place."""
        shape = self.shape
        heads = flow.view(len(flow), shape.heads + 2 * shape.kv_heads, shape.head_size)
        queries, keys, values = torch.tensor_split(heads, (shape.heads, shape.heads + shape.kv_heads), dim=1)
        return _turned(queries, turns), torch.cat((_turned(keys, turns), values), dim=-1)

    def _attend(self, queries: torch.Tensor, seen: torch.Tensor, start: int) -> torch.Tensor:
        """Attend to all tokens before each one; the first queries are of token `start`."""
        each = self.shape.heads // self.shape.kv_heads
        keys, values = seen.repeat_interleave(each, dim=1).transpose(0, 1)[None].chunk(2, dim=-1)
        mask = None
        if start:
            mask = torch.ones((len(queries), len(seen)), dtype=torch.bool, device=self.place).tril(start)
        out = functional.scaled_dot_product_attention(
            queries.transpose(0, 1)[None], keys, values, attn_mask=mask, is_causal=not start
        )
        return out[0].transpose(0, 1)


def _normed(flow: torch.Tensor) -> torch.Tensor:
    return functional.rms_norm(flow, flow.shape[-1:], eps=1e-5)


def _turned(heads: torch.Tensor, turns: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    cosines, sines = turns
    one, other = heads.float().chunk(2, dim=-1)
    return torch.cat((one * cosines - other * sines, other * cosines + one * sines), dim=-1).to(heads.dtype)


class Tiered:
    """A paged cache's chunks in kvtier: the primary in host memory, and an fs tier behind it."""

    def __init__(self, cache: PagedCache, blocks: int, folder: str, device: Device, stack: ExitStack) -> None:
        chunk_bytes = slot_layout(cache.canonical).slot_bytes
        config = EngineConfig.from_dict(
            {
                "cpu_bytes_to_use": (blocks + 1) * (-(-chunk_bytes // 4_096) * 4_096),
                "chunk_bytes": chunk_bytes,
                "runner": "thread",
                "secondary_tiers": [{"type": "fs", "root": folder}],
                "limits": {"lease_share": 1.0, "cascade_share": 1.0},  # One request has it all to itself.
            }
        )
        region = Region.private(config.rows, config.row_bytes)
        self.steps = stack.enter_context(StepManager.start(config, region=region))
        memory = stack.enter_context(host_memory(region, device.pin_with))
        self._worker = stack.enter_context(
            TransferWorker(cache.canonical, memory.rows[:, :chunk_bytes], copiers=device.ways[0].copiers)
        )
        self._stored_at_once = max(1, STORED_AT_ONCE_BYTES // chunk_bytes)
        self.chunk_bytes = chunk_bytes

    def store(self, keys: Sequence[OffloadKey], blocks: Sequence[int]) -> None:
        """Store blocks, and wait until they are in the fs tier, too."""
        self.steps.on_new_request("store")
        for first in range(0, len(keys), self._stored_at_once):
            part = slice(first, first + self._stored_at_once)
            plan = self.steps.prepare_store(keys[part], "store")
            if plan is None or list(plan.keys) != list(keys[part]):
                raise Wrong(f"no room for chunks {first:,} and on in a primary of {self.steps.config.rows:,} rows")
            see_through(self._worker, Direction.STORE, [GroupBlocks(blocks[part], plan.rows)])
            self.steps.complete_store(plan.keys, "store")
            if not self.steps.drain(WAIT_S):
                raise Wrong(f"the fs tier has not stored {len(plan.keys):,} chunks after {WAIT_S:.0f} s")
        self.steps.on_request_finished("store")

    def load(self, keys: Sequence[OffloadKey], blocks: Sequence[int]) -> None:
        """Find all chunks, promote those that are in the tier alone, and load them into blocks."""
        self.steps.on_new_request("load")
        until = time.monotonic() + PROMOTION_S
        while (waits := self._looked_up(keys)) and time.monotonic() < until:
            self.steps.end_step()
            time.sleep(STEP_S)
        if waits:
            raise Wrong(f"{len(keys):,} chunks have not been promoted after {PROMOTION_S:.0f} s")
        rows = self.steps.prepare_load(keys, "load")
        self.steps.end_step()
        see_through(self._worker, Direction.LOAD, [GroupBlocks(blocks, rows)])
        self.steps.complete_load(keys, "load")
        self.steps.on_request_finished("load")
        self.steps.end_step()

    def clear_primary(self) -> None:
        """Leave the chunks to the fs tier alone."""
        if not self.steps.reset(WAIT_S):
            raise Wrong(f"the primary could not be cleared after {WAIT_S:.0f} s")
        self.steps.on_reset_flushed()

    def _looked_up(self, keys: Sequence[OffloadKey]) -> bool:
        """Look all keys up; say whether some are still on their way."""
        found = [self.steps.lookup(key, "load") for key in keys]
        if LookupResult.MISS in found:
            raise Wrong(f"chunk {found.index(LookupResult.MISS):,} of {len(keys):,} was stored, and is nowhere")
        return any(result is not LookupResult.HIT for result in found)


class Prompt(NamedTuple):
    """A prompt, the part of it that can be a hit, and its blocks: those computed into, and those loaded into."""

    tokens: list[int]
    hit_tokens: int
    keys: list[OffloadKey]
    computed_in: list[int]
    loaded_into: list[int]

    @classmethod
    def of(cls, shape: Shape, length: int, blocks: int) -> "Prompt":
        dice = random.Random(length)
        tokens = [dice.randrange(shape.vocabulary) for _ in range(length)]
        whole = (length - 1) // BLOCK_TOKENS  # The last token is always computed: its logits are asked for.
        ends = [(index + 1) * BLOCK_TOKENS for index in range(whole)]
        keys = [
            make_offload_key(sha256(repr((length, tokens[end - BLOCK_TOKENS : end], end)).encode()).digest())
            for end in ends
        ]
        needed = -(-(length + TOKENS_AFTER) // BLOCK_TOKENS)
        places = dice.sample(range(blocks), 2 * needed)
        return cls(tokens, whole * BLOCK_TOKENS, keys, places[:needed], places[needed:])


class Answer(NamedTuple):
    """The logits after a prompt, and the tokens that follow."""

    logits: torch.Tensor
    tokens: list[int]


def measure(device: Device, shape: Shape, folder: str) -> Iterator[FirstToken]:
    """Yield the times to the first token of each prompt: computed, loaded from cpu, promoted from fs."""
    if device.has_streams:
        torch.cuda.empty_cache()  # Of other sizes than are needed now.
    needed, free = int(ROOM * max(shape.prompts) * shape.token_bytes), shutil.disk_usage(folder).free
    if free < needed:
        room = f"{shown_bytes(free)} are free in {os.path.dirname(folder)}, {shown_bytes(needed)} needed"
        raise NotHere(f"{room}: --dir names another")
    blocks = 2 * -(-(max(shape.prompts) + TOKENS_AFTER) // BLOCK_TOKENS)
    model, cache = Transformer(shape, device.place), PagedCache(shape, blocks, device.place)
    with ExitStack() as stack:
        tiered = Tiered(cache, blocks // 2, folder, device, stack)
        device_rate = _plain_rate(device)
        disk_rate = _disk_rate(folder, device.name)
        for length in shape.prompts:
            serving = Serving(device, model, cache, tiered, Prompt.of(shape, length, blocks))
            computed = serving.computed(shape.rounds)
            yield computed
            tiered.store(serving.prompt.keys, serving.prompt.computed_in[: len(serving.prompt.keys)])
            rest_s = serving.rest_s(shape.rounds)
            loaded = serving.loaded("cpu", shape.rounds, lambda: None)
            yield _beside(loaded, computed, rest_s + loaded.loaded_bytes / device_rate)
            promoted = serving.loaded("fs", shape.rounds, tiered.clear_primary)
            bytes_ = promoted.loaded_bytes
            yield _beside(promoted, computed, rest_s + bytes_ / device_rate + bytes_ / disk_rate)
            tiered.steps.delete(serving.prompt.keys)
            tiered.steps.drain(WAIT_S)


class Serving:
    """One prompt, served again and again."""

    def __init__(self, device: Device, model: Transformer, cache: PagedCache, tiered: Tiered, prompt: Prompt) -> None:
        self.prompt = prompt
        self._device, self._model, self._cache, self._tiered = device, model, cache, tiered
        self._computed_in, self._loaded_into = (
            torch.tensor(blocks, device=device.place) for blocks in (prompt.computed_in, prompt.loaded_into)
        )
        self._right: Answer | None = None

    def computed(self, rounds: int) -> FirstToken:
        """Compute the prompt each time."""
        hit = self.prompt.hit_tokens

        def serve() -> torch.Tensor:
            self._model.run(self.prompt.tokens[:hit], 0, self._cache, self._computed_in)
            return self._rest(self._computed_in)

        times = [self._timed(serve)[0] for _ in range(rounds + 1)][1:]  # The first one finds kernels and memory.
        self._right = self._answer(serve(), self._computed_in)
        return self._told("computed", times, 0, same=True)

    def rest_s(self, rounds: int) -> float:
        """Return the time of what is computed after a hit of everything else."""
        return min(self._timed(lambda: self._rest(self._computed_in))[0] for _ in range(rounds + 1))

    def loaded(self, source: str, rounds: int, prepare: Callable[[], None]) -> FirstToken:
        """Load what can be a hit each time, into blocks that hold other bytes."""
        assert self._right is not None
        keys, times, same = self.prompt.keys, list[float](), True
        into = self.prompt.loaded_into[: len(keys)]

        def serve() -> torch.Tensor:
            self._tiered.load(keys, into)
            return self._rest(self._loaded_into)

        for number in range(rounds + 1):
            prepare()
            self._forget()
            if not number and torch.equal(self._rest(self._loaded_into), self._right.logits):
                raise Wrong("the model answers alike without its KV: nothing would be proved")
            seconds, logits = self._timed(serve)
            times.append(seconds)
            answer = self._answer(logits, self._loaded_into)
            same &= torch.equal(answer.logits, self._right.logits) and answer.tokens == self._right.tokens
        return self._told(source, times[1:], len(keys) * self._tiered.chunk_bytes, same=same)

    def _rest(self, blocks: torch.Tensor) -> torch.Tensor:
        hit = self.prompt.hit_tokens
        return self._model.run(self.prompt.tokens[hit:], hit, self._cache, blocks)

    def _timed(self, serve: Callable[[], torch.Tensor]) -> tuple[float, torch.Tensor]:
        self._device.synchronize()
        begun = time.perf_counter()
        logits = serve()
        int(logits.argmax())  # The first token, on the host.
        return time.perf_counter() - begun, logits

    def _answer(self, logits: torch.Tensor, blocks: torch.Tensor) -> Answer:
        first, tokens = logits, list[int]()
        for number in range(TOKENS_AFTER):
            tokens.append(int(logits.argmax()))
            logits = self._model.run(tokens[-1:], len(self.prompt.tokens) + number, self._cache, blocks)
        return Answer(first, tokens)

    def _forget(self) -> None:
        """Have the blocks hold what no prompt has computed."""
        for tensor in self._cache.canonical.tensors:
            tensor[self._loaded_into] = 1
        self._device.synchronize()

    def _told(self, source: str, times: list[float], loaded_bytes: int, *, same: bool) -> FirstToken:
        return FirstToken(
            tokens=len(self.prompt.tokens),
            source=source,
            ttft_s=statistics.median(times),
            spread_s=(min(times), max(times)),
            loaded_bytes=loaded_bytes,
            limit_s=None,
            saved=None,
            same_tokens=same,
        )


def _beside(found: FirstToken, computed: FirstToken, limit_s: float) -> FirstToken:
    return replace(found, limit_s=limit_s, saved=1 - found.ttft_s / computed.ttft_s)


def _plain_rate(device: Device) -> float:
    """Return the bytes a second of one plain copy to the device."""
    case = Case(2 << 20, 1, device=device.name, moves=RAW_BYTES[device.name])
    copy = plain_copy(case, to_device=True)
    times = list[float]()
    for _ in range(4):
        begun = time.perf_counter()
        copy()
        times.append(time.perf_counter() - begun)
    return case.moved_bytes / min(times)


def _disk_rate(folder: str, device_name: str) -> float:
    """Return the bytes a second that plain threads read from a file in this folder, past the page cache if they can."""
    with Region.private(RAW_BYTES[device_name] // RAW_CHUNK_BYTES, RAW_CHUNK_BYTES) as region:
        buffers = [region.row(row) for row in range(region.rows)]
        raw = RawFile(os.path.join(folder, ".raw"), buffers, direct=takes_direct(folder))
        try:
            return max(raw.read(RAW_THREADS) for _ in range(3))
        finally:
            raw.close()
            for buffer in buffers:
                buffer.release()
