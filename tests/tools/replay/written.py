"""Traces as files."""

import gzip
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import zstandard

from kvtier.tools.replay.traces import TraceRequest

COMPRESSIONS = {".gz": gzip.compress, ".zst": zstandard.ZstdCompressor().compress}


def write_trace(
    path: str | os.PathLike[str], requests: Iterable[TraceRequest], meta: Mapping[str, Any] | None = None
) -> None:
    """Write a trace, compressed as its name says."""
    lines = [*([{"meta": meta}] if meta else []), *requests]
    content = msgspec.json.Encoder().encode_lines(lines)
    Path(path).write_bytes(COMPRESSIONS.get(Path(path).suffix, bytes)(content))
