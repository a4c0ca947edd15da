"""The fs tier on a directory that several processes share: its server is the file system's, and not ours to break."""

import random
from contextlib import suppress
from pathlib import Path
from typing import Any

from kvtier.backend import chunk_hash
from tests.remote.kit import CHUNK_BYTES, key
from tests.remote.remotes import Held, Remote

FILES_DISTURBED = 4


class SharedFsRemote(Remote):
    name = "fs"

    def __init__(self, folder: Path) -> None:
        self.root = folder / "shared"

    def tier(self, *, by_proxy: bool = False, quick: bool = True) -> dict[str, Any]:
        return {"type": "fs", "layout": "files", "shared": True, "capacity_bytes": "256MiB", "root": str(self.root)}

    def end(self) -> None:
        pass  # Nothing runs.

    def disturb(self, dice: random.Random) -> None:
        """Damage some files, and remove others."""
        files = sorted(self.root.rglob("*.bin"))
        for path in dice.sample(files, min(len(files), FILES_DISTURBED)):
            with suppress(FileNotFoundError):  # A tier was faster.
                if dice.random() < 0.5:
                    path.unlink()
                    continue
                with open(path, "r+b") as file:
                    file.seek(dice.randrange(CHUNK_BYTES))
                    file.write(b"damaged")

    def held(self, number: int) -> Held:
        value = self._path(number).read_bytes()
        return Held(value[:CHUNK_BYTES], value[CHUNK_BYTES:])

    def plant(self, number: int, held: Held) -> None:
        self._path(number).write_bytes(held.row + held.seal)

    def _path(self, number: int) -> Path:
        (path,) = self.root.rglob(f"{chunk_hash(key(number)).hex()}.bin")
        return path
