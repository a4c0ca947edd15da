import gzip
from pathlib import Path

import msgspec
import zstandard

from kvtier.tools.replay.traces import TraceRequest

COMPRESSIONS = {".gz": gzip.compress, ".zst": zstandard.ZstdCompressor().compress}


def write_trace(path, requests, meta=None):
    lines = [*([{"meta": meta}] if meta else []), *requests]
    content = msgspec.json.Encoder().encode_lines(lines)
    Path(path).write_bytes(COMPRESSIONS.get(Path(path).suffix, bytes)(content))


def write_prompts(path, prompts, *, every_ms=1):
    write_trace(path, [TraceRequest(every_ms * at, 512 * len(ids), 9, tuple(ids)) for at, ids in enumerate(prompts)])
    return str(path)
