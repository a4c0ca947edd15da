"""The redis tier on a server of its own."""

from pathlib import Path
from typing import Any

from kvtier.backend import chunk_hash
from tests.redis.servers import RedisServer
from tests.remote.kit import CHUNK_BYTES, key
from tests.remote.remotes import Held, ServerRemote
from tests.remote.servers import Proxy

PATIENCE_S = 10.0


class RedisRemote(ServerRemote):
    name = "redis"

    def __init__(self, folder: Path) -> None:
        self.server = RedisServer(folder, "--maxmemory-policy", "noeviction")
        self.start()
        self.proxy = Proxy(self.server.port)

    def tier(self, *, by_proxy: bool = False, quick: bool = True) -> dict[str, Any]:
        address = self.proxy.address if by_proxy else self.server.address
        return {"type": "redis", "url": f"redis://{address}", "timeout_s": 0.5 if quick else PATIENCE_S}

    def start(self) -> None:
        self.server.start()

    def kill(self) -> None:
        self.server.kill()

    def signal(self, number: int) -> None:
        self.server.signal(number)

    def fill(self) -> None:
        self.server.ask("CONFIG", "SET", "maxmemory", "1")

    def make_room(self) -> None:
        self.server.ask("CONFIG", "SET", "maxmemory", "0")

    def held(self, number: int) -> Held:
        value = self.server.ask("GET", self._name(number))
        return Held(value[:CHUNK_BYTES], value[CHUNK_BYTES:])

    def plant(self, number: int, held: Held) -> None:
        self.server.ask("SET", self._name(number), held.row + held.seal)

    def _name(self, number: int) -> bytes:
        (name,) = self.server.ask("KEYS", f"*{chunk_hash(key(number)).hex()}.bin")
        return name
