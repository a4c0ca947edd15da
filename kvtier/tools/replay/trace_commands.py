"""`kvtier trace`: the contents of a trace, and traces from logs of token ids."""

import os
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Annotated, Any

import msgspec
import numpy as np
import typer
from rich.console import Console

from kvtier.errors import ConfigError, TraceError
from kvtier.tools.options import JsonOption, LimitOption, StrictOption, TraceArgument
from kvtier.tools.outputs import busy, check_outputs, check_writable, counted, note, plain_table, write_json
from kvtier.tools.replay.logs import Conversion
from kvtier.tools.replay.study import measure
from kvtier.tools.replay.traces import TraceRequest, write_trace
from kvtier.tools.replay.workload import open_trace

TRACE_NAMES = (".jsonl", ".jsonl.gz", ".jsonl.zst")
BLOCK_TOKENS_MAX = 1 << 20  # No engine has blocks of a million tokens.


class Lengths(msgspec.Struct):
    """Lengths of all requests, in tokens."""

    total: int
    mean: float
    p50: int
    p99: int
    most: int


class TraceInfo(msgspec.Struct):
    """The contents of a trace."""

    trace: str
    meta: dict[str, Any]
    block_tokens: int
    requests: int
    sessions: int | None
    seconds: float
    input_length: Lengths
    output_length: Lengths
    block_references: int
    unique_blocks: int
    best_hit_ratio: float
    hints: dict[str, int]  # Requests by the field of their hints; empty without hints.


def info(
    trace: TraceArgument, limit: LimitOption = None, strict: StrictOption = False, json_path: JsonOption = None
) -> None:
    """Show the contents of a trace: requests, lengths, blocks, and the best hit ratio that any cache could have."""
    check_outputs(json_path)
    opened = open_trace(trace, limit=limit, strict=strict)
    tally = _TraceTally(opened)
    with busy(f"reading {os.path.basename(opened.path)}"):
        extent = measure(tally)
    found = TraceInfo(
        trace=os.path.basename(opened.path),
        meta=dict(opened.meta),
        block_tokens=opened.block_tokens,
        requests=extent.requests,
        sessions=len(tally.sessions) or None,
        seconds=(tally.last_ms - tally.first_ms) / 1_000,
        input_length=_lengths(tally.inputs),
        output_length=_lengths(tally.outputs),
        block_references=extent.block_references,
        unique_blocks=extent.unique_blocks,
        best_hit_ratio=extent.hit_ratio(extent.best_hits),
        hints=dict(tally.hints),
    )
    _show(found, write_json(json_path, found))


def convert(
    logs: Annotated[list[str], typer.Argument(metavar="LOG...", help="Files in the order in which they were written.")],
    output: Annotated[
        str, typer.Option("--output", "-o", metavar="OUT", help="The trace to write: .jsonl, .jsonl.gz or .jsonl.zst.")
    ],
    block_tokens: Annotated[int, typer.Option(min=1, max=BLOCK_TOKENS_MAX, help="Tokens of a block.")] = 16,
) -> None:
    """Convert prompts that were logged as token ids, in JSON lines, to a trace.

    Each id stands for its block and all blocks before it. The last partial block of a prompt is dropped.
    """
    _check_output(output)
    conversion = Conversion(logs, block_tokens)
    with busy(f"reading {', '.join(map(os.path.basename, logs))}"):
        write_trace(output, _with_blocks(conversion, logs, block_tokens), {"block_size": block_tokens})
    times = "; without times in it, one request a second is assumed" if conversion.without_times else ""
    note(
        f"{output}: {counted(conversion.requests, 'request')}, {counted(conversion.blocks, 'block')} of "
        f"{counted(block_tokens, 'token')}{times}"
    )


def _with_blocks(conversion: Conversion, logs: list[str], block_tokens: int) -> Iterator[TraceRequest]:
    yield from conversion
    if not conversion.blocks:
        raise TraceError(
            f"{', '.join(logs)}: of {conversion.requests:,} requests none fills a block of "
            f"{block_tokens:,} tokens, so the trace would have no blocks; longer prompts, or fewer "
            "--block-tokens, accepted"
        )


def _check_output(path: str) -> None:
    check_writable("--output", path)
    is_pipe = os.path.exists(path) and not os.path.isfile(path)  # A pipe may have any name.
    if not path.endswith(TRACE_NAMES) and not is_pipe:
        *others, last = TRACE_NAMES
        raise ConfigError(f"--output {path}: expected a name that ends in {', '.join(others)} or {last}")


class _TraceTally:
    """Requests in passing, and their counts."""

    def __init__(self, requests: Iterable[TraceRequest]) -> None:
        self._requests = requests
        self.inputs, self.outputs = array("q"), array("q")
        self.sessions: set[int | str] = set()
        self.hints: Counter[str] = Counter()
        self.first_ms = self.last_ms = 0.0

    def __iter__(self) -> Iterator[TraceRequest]:
        for request in self._requests:
            if not self.inputs:
                self.first_ms = request.timestamp_ms
            self.last_ms = request.timestamp_ms
            self.inputs.append(request.input_length)
            self.outputs.append(request.output_length)
            if request.session_id is not None:
                self.sessions.add(request.session_id)
            if request.hint is not None:
                self.hints.update(msgspec.to_builtins(request.hint).keys())
            yield request


def _lengths(lengths: "array[int]") -> Lengths:
    values = np.asarray(lengths)
    p50, p99 = np.percentile(values, (50, 99), method="inverted_cdf")
    return Lengths(int(values.sum()), float(values.mean()), int(p50), int(p99), int(values.max()))


def _show(found: TraceInfo, console: Console) -> None:
    table = plain_table("", "", title=found.trace, show_header=False)
    for name, value in (
        ("requests", f"{found.requests:,}"),
        ("sessions", "unknown" if found.sessions is None else f"{found.sessions:,}"),
        ("span", f"{found.seconds:,.0f} s"),
        ("prompt tokens", _shown(found.input_length)),
        ("reply tokens", _shown(found.output_length)),
        ("tokens of a block", f"{found.block_tokens:,}"),
        ("block references", f"{found.block_references:,}"),
        ("unique blocks", f"{found.unique_blocks:,}"),
        ("best possible hit ratio", f"{found.best_hit_ratio:.4f}"),
        ("hints", "; ".join(f"{name} {count:,}" for name, count in found.hints.items()) or "none"),
    ):
        table.add_row(name, value)
    console.print(table)


def _shown(lengths: Lengths) -> str:
    return (
        f"{lengths.total:,}; a request {lengths.mean:,.0f} (p50 {lengths.p50:,}, p99 {lengths.p99:,}, "
        f"most {lengths.most:,})"
    )
