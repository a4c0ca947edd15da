"""Golden directories: what a tier of each layout, sealed and not, has written, for every later version to read.

    .venv/bin/python -m tests.frozen.golden

writes `golden/` again. Run it only with a change that is meant to change a format: directories of before are then lost.
"""

import asyncio
import os
import shutil
import tarfile
import tempfile
from pathlib import Path

from kvtier import EngineConfig, TieringOffloadingManager, make_offload_key

GOLDEN = Path(__file__).parent / "golden"
SECRETS = "KVTIER_GOLDEN_KEY"
os.environ[SECRETS] = "5a" * 32
SEALED = {"seal": "aes-256-gcm", "seal_key_env": SECRETS}
LAYOUTS = {
    "files": {"layout": "files"},
    "files-sealed": {"layout": "files", **SEALED},
    "segments": {"layout": "segments"},
    "segments-sealed": {"layout": "segments", **SEALED},
}
CHUNK_BYTES = 4_000  # Rows are padded to 4,096.
CHUNKS = {make_offload_key(bytes([number]) * 32): bytes([number, 255 - number]) * 2_000 for number in range(6)}


def config_of(layout, root):
    tier = {"type": "fs", "root": str(root), "capacity_bytes": "1MiB", **LAYOUTS[layout]}
    namespace = {"model_name": "org/model"}
    sizes = {"cpu_bytes_to_use": "256KiB", "chunk_bytes": CHUNK_BYTES}
    return EngineConfig.from_dict({**sizes, "namespace": namespace, "secondary_tiers": [tier], "runner": "inline"})


async def write(layout, root):
    async with TieringOffloadingManager.open(config_of(layout, root)) as engine:
        await engine.put(list(CHUNKS), list(CHUNKS.values()))
        assert await engine.drain(10)


def main():
    shutil.rmtree(GOLDEN, ignore_errors=True)
    GOLDEN.mkdir()
    for layout in LAYOUTS:
        with tempfile.TemporaryDirectory() as folder, tarfile.open(GOLDEN / f"{layout}.tar.xz", "w:xz") as archive:
            root = Path(folder) / "root"
            asyncio.run(write(layout, root))
            archive.add(root, "root")


if __name__ == "__main__":
    main()
