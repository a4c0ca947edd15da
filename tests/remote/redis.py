"""The redis tier on a server of its own."""

from kvtier.backend import OffloadKey, chunk_hash
from tests.redis.servers import RedisServer
from tests.remote.remotes import Held, ServerRemote, Stored
from tests.remote.servers import Proxy

PATIENCE_S = 10.0


class Values(Stored):
    def __init__(self, server, prefix=""):
        self._server, self._prefix = server, prefix
        self._names: dict[OffloadKey, bytes] = {}

    def name(self, key):
        if key not in self._names:
            (self._names[key],) = self._server.ask("KEYS", f"{self._prefix}*{chunk_hash(key).hex()}.bin")
        return self._names[key]

    def held(self, key):
        value = self._server.ask("GET", self.name(key))
        return None if value is None else Held.of(value)

    def plant(self, key, held):
        self._server.ask("SET", self.name(key), held.row + held.seal)


class RedisRemote(ServerRemote):
    name = "redis"

    def __init__(self, folder):
        self.server = RedisServer(folder, "--maxmemory-policy", "noeviction")
        self.start()
        self.stored = Values(self.server)
        self.proxy = Proxy(self.server.port)

    def tier(self, *, by_proxy=False, quick=True):
        address = self.proxy.address if by_proxy else self.server.address
        where = {"type": "redis", "url": f"redis://{address}", "codec": self.codec}
        return where | {"timeout_s": 0.5 if quick else PATIENCE_S}

    def fill(self):
        self.server.ask("CONFIG", "SET", "maxmemory", "1")

    def make_room(self):
        self.server.ask("CONFIG", "SET", "maxmemory", "0")
