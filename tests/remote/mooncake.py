"""The mooncake tier on a pool of its own: a master that stays, and an owner of memory that is broken."""

import ctypes
import os
import time

import pytest

from kvtier.backend import SEAL_BYTES, FileMapper
from kvtier.backend.remote import name_prefix
from kvtier_backends.mooncake import MooncakeOptions
from kvtier_backends.mooncake.client import Meaning, connect, environment, meaning_of
from tests.mooncake.pools import Pool
from tests.remote import servers
from tests.remote.kit import CHUNK_BYTES, configured, describe
from tests.remote.outcomes import Fault
from tests.remote.remotes import Held, ServerRemote, Stored
from tests.remote.servers import Proxy, until

TIMEOUT_S, PATIENCE_S = 1.0, 10.0
OWNER_TTL_S = 2  # Until the master forgets an owner that is silent.
ENVIRONMENT = environment(MooncakeOptions(timeout_s=TIMEOUT_S))
"""What Mooncake reads when it is first imported in a process."""

PREFIX = "suite/"
FILLING = "filling-"


class Values(Stored):
    def __init__(self, client, prefix, mapper, value_bytes):
        self._client, self._value_bytes = client, value_bytes
        self._name = lambda key: name_prefix(prefix, mapper) + mapper.name(key)

    def held(self, key):
        if self._client.exist([self._name(key)]) == [0]:
            return None
        place = ctypes.create_string_buffer(self._value_bytes)
        assert self._client.get([self._name(key)], [ctypes.addressof(place)], self._value_bytes) == [self._value_bytes]
        return Held.of(place.raw)

    def plant(self, key, held):
        value = held.row + held.seal
        place = ctypes.create_string_buffer(value, len(value))
        assert self._client.put([self._name(key)], [ctypes.addressof(place)], len(value)) == [0]


class MooncakeRemote(ServerRemote):
    name = "mooncake"
    waited_for = frozenset({Fault.HUNG})

    def __init__(self, folder):
        os.environ.update(ENVIRONMENT)
        pytest.importorskip("mooncake.store", reason="a library that Mooncake needs is missing", exc_type=ImportError)
        self.pool = Pool(folder, client_ttl_s=OWNER_TTL_S)
        self.start()
        self.proxy = Proxy(self.pool.port)
        options = MooncakeOptions(master=self.pool.address, timeout_s=TIMEOUT_S)
        self._client = connect(options, "the test's")
        mapper = FileMapper(configured(describe(1, self.tier())).namespace)
        self.stored = Values(self._client, PREFIX, mapper, CHUNK_BYTES + SEAL_BYTES)
        self._filled: list[str] = []

    def tier(self, *, by_proxy=False, quick=True):
        master = self.proxy.address if by_proxy else self.pool.address
        return {"type": "mooncake", "master": master, "prefix": PREFIX, "timeout_s": TIMEOUT_S if quick else PATIENCE_S}

    def start(self):
        until(lambda: not self.pool.segments())  # Else it would be told from the one before by nothing.
        self.pool.add_owner()

    def kill(self):
        self.pool.owners.pop().kill()

    def end(self):
        self._client.close()
        self.proxy.end()
        self.pool.close()

    def signal(self, number):
        self.pool.owners[-1].signal(number)

    def fill(self):
        """Fill it with what is never evicted, first with large values, then with small ones."""
        from mooncake.store import ReplicateConfig

        pinned = ReplicateConfig()
        pinned.with_hard_pin = True
        for size_bytes in (8 << 20, CHUNK_BYTES, 4_096):
            self._fill_with(size_bytes, pinned)

    def _fill_with(self, size_bytes, pinned):
        value = ctypes.create_string_buffer(size_bytes)
        ends_at = time.monotonic() + servers.PATIENCE_S
        while True:
            self._filled.append(f"{FILLING}{len(self._filled)}")  # It may be there, whatever is answered.
            name, address = self._filled[-1], ctypes.addressof(value)
            (code,) = self._client._store.batch_put_from([name], [address], [size_bytes], pinned)
            if meaning_of(code) is Meaning.FULL:
                return
            assert time.monotonic() < ends_at, code

    def make_room(self):
        codes = self._client.remove(self._filled)
        assert all(code == 0 or meaning_of(code) is Meaning.MISSING for code in codes), codes
        self._filled.clear()
