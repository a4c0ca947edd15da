"""The fs tier on a directory that several processes share: its server is the file system's, and not ours to break."""

from contextlib import suppress

from kvtier.backend import chunk_hash
from tests.remote.kit import CHUNK_BYTES
from tests.remote.remotes import Held, Remote, Stored

FILES_DISTURBED = 4


class Files(Stored):
    def __init__(self, root):
        self._root = root

    def held(self, key):
        value = self._path(key).read_bytes()
        return Held(value[:CHUNK_BYTES], value[CHUNK_BYTES:])  # Its footer is longer than a seal.

    def plant(self, key, held):
        self._path(key).write_bytes(held.row + held.seal)

    def _path(self, key):
        (path,) = self._root.rglob(f"{chunk_hash(key).hex()}.bin")
        return path


class SharedFsRemote(Remote):
    name = "fs"

    def __init__(self, folder):
        self.root = folder / "shared"
        self.stored = Files(self.root)

    def tier(self, *, by_proxy=False, quick=True):
        return {"type": "fs", "layout": "files", "shared": True, "capacity_bytes": "256MiB", "root": str(self.root)}

    def end(self):
        pass  # Nothing runs.

    def disturb(self, dice):
        files = sorted(self.root.rglob("*.bin"))
        for path in dice.sample(files, min(len(files), FILES_DISTURBED)):
            with suppress(FileNotFoundError):  # A tier was faster.
                if dice.random() < 0.5:
                    path.unlink()
                    continue
                with open(path, "r+b") as file:
                    file.seek(dice.randrange(CHUNK_BYTES))
                    file.write(b"damaged")
