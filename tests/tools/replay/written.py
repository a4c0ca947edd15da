"""Traces as files."""

import gzip
from pathlib import Path

import msgspec
import zstandard

COMPRESSIONS = {".gz": gzip.compress, ".zst": zstandard.ZstdCompressor().compress}


def write_trace(path, requests, meta=None):
    """Write a trace, compressed as its name says."""
    lines = [*([{"meta": meta}] if meta else []), *requests]
    content = msgspec.json.Encoder().encode_lines(lines)
    Path(path).write_bytes(COMPRESSIONS.get(Path(path).suffix, bytes)(content))
