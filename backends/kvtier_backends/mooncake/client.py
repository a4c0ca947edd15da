"""Mooncake's client: how it is made, the meaning of its codes, and the rules for its use.

It is C++ in this process. It may write into a buffer minutes after it has said that the call failed. `close` during a
call is a segmentation fault. So it sees staging alone, and in doubt it is left open. It reads its environment once a
process, so variables are set before it is imported.
"""

import ctypes
import errno
import importlib
import math
import os
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Protocol, TypeVar

from kvtier.backend import BackendUnavailable, ConfigError, Limit, TransferFailed
from kvtier_backends.mooncake.options import MooncakeOptions

CONNECT_S_MAX = 1.0
ZERO_COPY_CHUNKS = 32  # A call: more than some hundreds are refused.
PACKAGE = "mooncake-transfer-engine-non-cuda"

Move = Callable[[Sequence[str], Sequence[int], int], list[int]]

TORN = -707  # The read's lease ran out: somebody may have written over it meanwhile.


E = TypeVar("E", bound=BackendUnavailable | TransferFailed)


class ReplicateConfig(Protocol):
    """The options of a store, as Mooncake's package has them."""

    replica_num: int


class MooncakeDistributedStore(Protocol):
    """The methods that this tier calls of Mooncake's client. Each answers a code, or one a key."""

    def setup(self, config: dict[str, object]) -> int: ...
    def batch_is_exist(self, keys: list[str]) -> list[int]: ...
    def batch_get_into(self, keys: list[str], buffer_ptrs: list[int], sizes: list[int]) -> list[int]: ...
    def batch_upsert_from(
        self, keys: list[str], buffer_ptrs: list[int], sizes: list[int], config: ReplicateConfig
    ) -> list[int]: ...
    def batch_remove(self, keys: list[str], force: bool) -> list[int]: ...
    def close(self) -> int: ...


class Meaning(Enum):
    """The meaning of a code of Mooncake's for a chunk."""

    MISSING = "missing"
    TOO_LONG = "too long"  # For the buffer: it is no chunk of this length.
    FULL = "full"
    BUSY = "busy"  # Somebody else is at it.
    FAILED = "failed"  # On its way, which may not be over.
    AWAY = "away"  # Nobody has said anything: the master does not answer.


_MEANINGS = {
    -200: Meaning.FULL,  # NO_AVAILABLE_HANDLE
    -600: Meaning.TOO_LONG,  # INVALID_PARAMS
    -703: Meaning.MISSING,  # REPLICA_IS_NOT_READY: its first store is not over.
    -704: Meaning.MISSING,  # OBJECT_NOT_FOUND
    -705: Meaning.BUSY,  # OBJECT_ALREADY_EXISTS: stored by somebody else at the same time.
    -706: Meaning.BUSY,  # OBJECT_HAS_LEASE
    TORN: Meaning.MISSING,  # LEASE_EXPIRED
    -708: Meaning.BUSY,  # OBJECT_HAS_REPLICATION_TASK
    -714: Meaning.BUSY,  # OBJECT_REPLICA_BUSY
    -800: Meaning.FAILED,  # TRANSFER_FAIL
    -801: Meaning.FAILED,  # Mooncake's own checksum, where somebody has switched it on.
    -900: Meaning.AWAY,  # RPC_FAIL
    -901: Meaning.AWAY,  # The master did not answer in time.
}
_NUMBERS = {-901: errno.ETIMEDOUT}
_NUMBERS_BY_MEANING = {Meaning.BUSY: errno.EBUSY, Meaning.FAILED: errno.EIO, Meaning.AWAY: errno.ENOTCONN}


def meaning_of(code: int) -> Meaning:
    """Return the meaning of a negative code. An unknown code is a failed transfer: the slot is not used again."""
    return _MEANINGS.get(code, Meaning.FAILED)


def number_of(code: int) -> int:
    """Return the system's error number that comes nearest to a negative code: failures are counted by such names."""
    return _NUMBERS.get(code) or _NUMBERS_BY_MEANING.get(meaning_of(code), errno.EIO)


def caused(error: E, number: int) -> E:
    """Have an error say what lies behind it."""
    error.__cause__ = OSError(number, os.strerror(number))
    return error


def has_ended(code: int) -> bool:
    """Say whether no byte can come after this answer: nothing was under way, or all of it went well."""
    return code >= 0 or (meaning_of(code) is not Meaning.FAILED and code != TORN)


class Client:
    """One connection to a pool; for any thread. Its calls block, and let Python run meanwhile."""

    def __init__(self, store: "MooncakeDistributedStore", kept: "ReplicateConfig") -> None:
        """Take over a store that is set up."""
        self._store = store
        self._kept = kept

    def exist(self, names: Sequence[str]) -> list[int]:
        """Say for each name whether it is there: 1, 0, or a code."""
        return self._store.batch_is_exist(list(names))

    def get(self, names: Sequence[str], addresses: Sequence[int], size_bytes: int) -> list[int]:
        """Fill a buffer for each name, and say how many bytes it has, or a code."""
        return self._store.batch_get_into(list(names), list(addresses), [size_bytes] * len(names))

    def put(self, names: Sequence[str], addresses: Sequence[int], size_bytes: int) -> list[int]:
        """Store a buffer under each name, in place of what was there: 0, or a code."""
        return self._store.batch_upsert_from(list(names), list(addresses), [size_bytes] * len(names), self._kept)

    def remove(self, names: Sequence[str]) -> list[int]:
        """Remove the names, though somebody reads them: 0, or a code."""
        return self._store.batch_remove(list(names), True)

    def close(self) -> None:
        """Take leave of the pool. Never while another call is under way: that is a segmentation fault."""
        self._store.close()

    def leave(self) -> None:
        """Leave it open until the process ends: a call of it hangs, and even to forget it would close it."""
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._store))


def connect(options: MooncakeOptions, tier_name: str) -> Client:
    """Make a client that lends no memory to the pool. Blocks. Raises `ConfigError` and `BackendUnavailable`."""
    store_type, replicate_type = _imported(options)
    store, kept = store_type(), replicate_type()
    kept.replica_num = options.replicas
    code = store.setup(
        {
            "local_hostname": options.local_host,
            "metadata_server": "P2PHANDSHAKE",
            "global_segment_size": 0,
            "local_buffer_size": 0,  # Bytes go to and from staging.
            "protocol": options.protocol,
            "rdma_devices": ",".join(options.devices),
            "master_server_addr": options.master,
            "tenant_id": options.tenant,
        }
    )
    if code != 0:
        raise BackendUnavailable(
            f"{tier_name}: the master {options.master} does not answer: Mooncake's setup says {code}"
        )
    return Client(store, kept)


class ZeroCopy(Limit):
    """Mooncake's own calls on rows themselves: the limit of the tier. For a process that may crash."""

    limit_is = "Mooncake's own zero-copy calls"

    def __init__(self, client: Client, prefix: str, rows: Sequence[memoryview]) -> None:
        """Take over a client, and store the rows."""
        self._client = client
        whose = f"{prefix}limit-{os.urandom(16).hex()}"
        self._names = [f"{whose}/{index}" for index in range(len(rows))]
        self._addresses = [ctypes.addressof(ctypes.c_char.from_buffer(row)) for row in rows]
        self._row_bytes = rows[0].nbytes
        self.write()

    def read(self) -> None:
        self._all(self._client.get, self._row_bytes)

    def write(self) -> None:
        self._all(self._client.put, 0)

    def close(self) -> None:
        self._client.remove(self._names)
        self._client.close()

    def _all(self, call: Move, expected: int) -> None:
        for start in range(0, len(self._names), ZERO_COPY_CHUNKS):
            part = slice(start, start + ZERO_COPY_CHUNKS)
            codes = call(self._names[part], self._addresses[part], self._row_bytes)
            if failed := [code for code in codes if code != expected]:
                raise BackendUnavailable(f"Mooncake's own calls fail: {failed[0]} for {len(failed)} of {len(codes)}")


def environment(options: MooncakeOptions) -> dict[str, str]:
    """Return the environment variables for Mooncake. The first tier of a process decides for all of them."""
    whole_s = str(transfer_s_max(options))
    return {
        "MC_TCP_STATUS_TIMEOUT_SEC": whole_s,
        "MC_TCP_PROGRESS_TIMEOUT_SEC": whole_s,
        "MC_RPC_TIMEOUT_MS": str(max(1, round(options.timeout_s * 1e3))),
        "MC_RPC_CONNECT_TIMEOUT_MS": str(max(1, round(min(options.timeout_s, CONNECT_S_MAX) * 1e3))),
        "MC_STORE_CLIENT_SETUP_RETRIES": "1",  # Of 20, a minute and a half: whoever opens the tier tries again.
        "MC_TCP_BIND_ADDRESS": options.local_host,
    }


def transfer_s_max(options: MooncakeOptions) -> int:
    """Return after how long Mooncake itself says that a transfer failed: in whole seconds, mostly before the tier."""
    return max(1, math.floor(options.timeout_s))


def _imported(
    options: MooncakeOptions,
) -> "tuple[Callable[[], MooncakeDistributedStore], Callable[[], ReplicateConfig]]":
    os.environ.update(environment(options))
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")  # As little as it has; it goes to standard error.
    try:
        module = importlib.import_module("mooncake.store")
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"type: 'mooncake' needs the package {PACKAGE}: pip install 'kvtier[mooncake]' "
            f"(with CUDA, mooncake-transfer-engine instead): {error}"
        ) from error
    except ImportError as error:  # A library of the system's: the wheel brings not all that it links.
        raise ConfigError(
            f"type: 'mooncake': the package is installed and cannot be loaded: {error}; Debian and Ubuntu have what "
            "it needs in libibverbs1, libnuma1 and libcurl4"
        ) from error
    return module.MooncakeDistributedStore, module.ReplicateConfig
