"""The fs tier on a directory that several processes share: its server is the file system's, and not ours to break."""

import random
from contextlib import suppress
from pathlib import Path
from typing import Any

from kvtier.backend import OffloadKey, chunk_hash
from tests.remote.kit import CHUNK_BYTES
from tests.remote.remotes import Held, Remote, Stored

FILES_DISTURBED = 4


class Files(Stored):
    """The chunks' files under a directory."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def held(self, key: OffloadKey) -> Held | None:
        value = self._path(key).read_bytes()
        return Held(value[:CHUNK_BYTES], value[CHUNK_BYTES:])  # Its footer is longer than a seal.

    def plant(self, key: OffloadKey, held: Held) -> None:
        self._path(key).write_bytes(held.row + held.seal)

    def _path(self, key: OffloadKey) -> Path:
        (path,) = self._root.rglob(f"{chunk_hash(key).hex()}.bin")
        return path


class SharedFsRemote(Remote):
    name = "fs"

    def __init__(self, folder: Path) -> None:
        self.root = folder / "shared"
        self.stored = Files(self.root)

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
