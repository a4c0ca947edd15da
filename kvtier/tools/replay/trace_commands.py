"""`kvtier trace`: what is in a trace, and traces made from what others log."""

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
from kvtier.tools.commands import JsonOption, LimitOption, StrictOption
from kvtier.tools.outputs import busy, check_outputs, check_writable, counted, note, plain_table, write_json
from kvtier.tools.replay.logs import FORMATS, Conversion
from kvtier.tools.replay.oracle import Saying, future, hinted
from kvtier.tools.replay.study import measure
from kvtier.tools.replay.traces import Request, write_trace
from kvtier.tools.replay.workload import GENERATED, open_trace

TRACE_NAMES = (".jsonl", ".jsonl.gz", ".jsonl.zst")
BLOCK_TOKENS_MAX = 1 << 20  # No engine has blocks of a million tokens.
ERROR_MAX = 10.0  # A factor of twenty thousand, once in three.
LIES_MAX = 0.99
SEED_MAX = (1 << 63) - 1  # Readers of JSON take no more.


class Lengths(msgspec.Struct):
    """Lengths in tokens, of all requests."""

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
    hints: dict[str, int]  # Requests by what their hints say; empty: there are no hints.


def info(
    trace: Annotated[
        str,
        typer.Argument(
            metavar="TRACE", help=f"A file in Mooncake's format (.jsonl, .jsonl.gz, .jsonl.zst), or {GENERATED!r}."
        ),
    ],
    limit: LimitOption = None,
    strict: StrictOption = False,
    json_path: JsonOption = None,
) -> None:
    """Say what is in a trace: requests, lengths, blocks, and the best hit ratio that any cache could have."""
    check_outputs(json_path, None)
    opened = open_trace(trace, limit=limit, strict=strict)
    tally = _Tally(opened)
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
        str,
        typer.Option("--output", "-o", metavar="OUT", help="The trace to write: .jsonl, .jsonl.gz or .jsonl.zst."),
    ],
    kind: Annotated[
        str | None,
        typer.Option("--from", help=f"The format: {', '.join(FORMATS)}. Without it, seen from the first line."),
    ] = None,
    block_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=BLOCK_TOKENS_MAX,
            help="Tokens of a block: a multiple of those that the logs have. Without it, theirs; 16 for token ids.",
        ),
    ] = None,
) -> None:
    """Make a trace from token ids, from logs of LMCache or vLLM, or from traces of others.

    Ids are made anew, each for its block and all blocks before it. The last partial block of a prompt is dropped.
    """
    if kind is not None and kind not in FORMATS:
        raise ConfigError(f"--from {kind!r}: one of {', '.join(FORMATS)} accepted")
    _check_output(output)
    conversion = Conversion(logs, kind=kind, block_tokens=block_tokens)
    with busy(f"reading {', '.join(map(os.path.basename, logs))}"):
        meta = {"block_size": conversion.block_tokens, "source": conversion.kind}
        write_trace(output, _with_blocks(conversion, logs), meta)
    times = "; without times in it, one request a second is assumed" if conversion.without_times else ""
    note(
        f"{output}: {counted(conversion.requests, 'request')}, {counted(conversion.blocks, 'block')} of "
        f"{counted(conversion.block_tokens, 'token')}{times}"
    )


def _with_blocks(conversion: Conversion, logs: list[str]) -> Iterator[Request]:
    yield from conversion
    if not conversion.blocks:
        raise TraceError(
            f"{', '.join(logs)}: of {conversion.requests:,} requests none fills a block of "
            f"{conversion.block_tokens:,} tokens, so the trace would have no blocks; longer prompts, or fewer "
            "--block-tokens, accepted"
        )


def hint(
    trace: Annotated[
        str,
        typer.Argument(
            metavar="TRACE", help=f"A file in Mooncake's format (.jsonl, .jsonl.gz, .jsonl.zst), or {GENERATED!r}."
        ),
    ],
    output: Annotated[
        str,
        typer.Option("--output", "-o", metavar="OUT", help="The trace to write: .jsonl, .jsonl.gz or .jsonl.zst."),
    ],
    over: Annotated[
        float, typer.Option(min=0, max=1, help="Share of the sessions' last requests that are said to be.")
    ] = 0.0,
    returns: Annotated[
        float, typer.Option(min=0, max=1, help="Share of the requests that return of which it is said when.")
    ] = 0.0,
    error: Annotated[
        float,
        typer.Option(min=0, max=ERROR_MAX, help="That time is wrong by a factor e^x, x normal with this deviation."),
    ] = 0.0,
    lies: Annotated[
        float, typer.Option(min=0, max=LIES_MAX, help="Share of the hints that are said of the wrong requests.")
    ] = 0.0,
    seed: Annotated[int, typer.Option(min=0, max=SEED_MAX, help="Of what is said.")] = 0,
    limit: LimitOption = None,
    strict: StrictOption = False,
) -> None:
    """Give the requests of a trace hints, true or wrong, from what comes later in it: for study."""
    if not (over or returns):
        raise ConfigError("--over or --returns: one of both is needed, above 0, or there is nothing to say")
    if error and not returns:
        raise ConfigError(f"--error {error}: accepted with --returns only: no other hint says a time")
    _check_output(output)
    opened = open_trace(trace, limit=limit, strict=strict)
    saying = Saying(over, returns, error, lies, seed)
    count: Counter[str] = Counter()
    with busy(f"reading {os.path.basename(opened.path)}"):
        known = future(opened, opened.block_tokens)
        meta = {**opened.meta, "block_size": opened.block_tokens, "hints": saying._asdict()}
        write_trace(output, _counted(hinted(opened, known, saying), count), meta)
    note(
        f"{output}: {counted(count['requests'], 'request')}. The hint over on {count['over']:,}; "
        f"{sum(known.last):,} are their sessions' last. The hint returns_in_s on {count['returns_in_s']:,}; "
        f"the sessions of {len(known.last) - known.returns_s.count(None):,} return."
    )


def _check_output(path: str) -> None:
    check_writable("--output", path)
    is_pipe = os.path.exists(path) and not os.path.isfile(path)  # It has whatever name it has.
    if not path.endswith(TRACE_NAMES) and not is_pipe:
        *others, last = TRACE_NAMES
        raise ConfigError(f"--output {path}: expected a name that ends in {', '.join(others)} or {last}")


def _counted(requests: Iterable[Request], count: "Counter[str]") -> Iterator[Request]:
    for request in requests:
        count["requests"] += 1
        if request.hint is not None:
            count.update(msgspec.to_builtins(request.hint).keys())
        yield request


class _Tally:
    """Requests as they pass, and what is counted of them."""

    def __init__(self, requests: Iterable[Request]) -> None:
        self._requests = requests
        self.inputs, self.outputs = array("q"), array("q")
        self.sessions: set[int | str] = set()
        self.hints: Counter[str] = Counter()
        self.first_ms = self.last_ms = 0.0

    def __iter__(self) -> Iterator[Request]:
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
        ("sessions", "not told" if found.sessions is None else f"{found.sessions:,}"),
        ("span", f"{found.seconds:,.0f} s"),
        ("prompt tokens", _said(found.input_length)),
        ("reply tokens", _said(found.output_length)),
        ("tokens of a block", f"{found.block_tokens:,}"),
        ("block references", f"{found.block_references:,}"),
        ("unique blocks", f"{found.unique_blocks:,}"),
        ("best possible hit ratio", f"{found.best_hit_ratio:.4f}"),
        ("hints", "; ".join(f"{name} {count:,}" for name, count in found.hints.items()) or "none"),
    ):
        table.add_row(name, value)
    console.print(table)


def _said(lengths: Lengths) -> str:
    return (
        f"{lengths.total:,}; a request {lengths.mean:,.0f} (p50 {lengths.p50:,}, p99 {lengths.p99:,}, "
        f"most {lengths.most:,})"
    )
