"""Mooncake's client: its options and creation, the meaning of its codes, and the rules for its use.

It may write into a buffer minutes after it has reported the call as failed, and `close` during a call is a segmentation
fault. So it sees only staging, and in doubt stays open. It reads its environment once, at its import.
"""

import ctypes
import errno
import importlib
import math
import os
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Annotated, Any, Literal

import msgspec

from kvtier.backend import BackendUnavailable, ConfigError, PositiveDuration, PositiveSize, SealOptions
from kvtier.backend.remote import PORT_MAX, Prefix, Text

PACKAGE = "mooncake-transfer-engine-non-cuda"

Move = Callable[[Sequence[str], Sequence[int], int], list[int]]

TORN = -707  # The read's lease expired: the value may have been overwritten meanwhile.
MASTER_LATE = -901


class MooncakeOptions(SealOptions, frozen=True, kw_only=True):
    """A master and how its pool is used. The pool's own configuration decides its capacity and its eviction."""

    master: Text = "127.0.0.1:50051"
    """`host:port` of the master, which knows the place of every chunk."""

    local_host: Text = "127.0.0.1"
    """This host's address on the network of the pool."""

    protocol: Literal["tcp", "rdma"] = "tcp"
    """Transport between this host and the pool. RDMA has not been tried."""

    devices: tuple[Text, ...] = ()
    """RDMA devices, such as `["mlx5_0"]`; none: Mooncake chooses."""

    tenant: Text = "default"
    """Name under which the master counts what is stored, if it has several tenants."""

    replicas: Annotated[int, msgspec.Meta(ge=1, le=16)] = 1
    """Number of owners that keep each chunk."""

    prefix: Prefix = "kvtier/"
    """Beginning of every name, so that other programs can use the pool, too."""

    staging_bytes: PositiveSize = 256 << 20
    """Most memory between Mooncake and rows, half of it for loads and half for stores."""

    timeout_s: PositiveDuration = 5.0
    """Limit of a call's wait for its turn, and again for the client. A chunk that misses it fails; its row is free."""

    def __post_init__(self) -> None:
        super().__post_init__()
        host, _, port = self.master.rpartition(":")
        if not host or not port.isdecimal() or not 1 <= int(port) <= PORT_MAX or "/" in host:
            raise ConfigError(f"master: {self.master!r} given, 'host:port' accepted")
        if self.devices and self.protocol == "tcp":
            raise ConfigError("devices: no use with protocol = 'tcp'; protocol = 'rdma' has devices")


class Meaning(Enum):
    MISSING = "missing"
    TOO_LONG = "too long"  # Longer than the buffer: no chunk of this length.
    FULL = "full"
    BUSY = "busy"  # Another client reads or writes it.
    FAILED = "failed"  # In transfer, which may go on.
    AWAY = "away"  # The master does not answer.


_MEANINGS = {
    -200: Meaning.FULL,  # NO_AVAILABLE_HANDLE
    -600: Meaning.TOO_LONG,  # INVALID_PARAMS
    -703: Meaning.MISSING,  # REPLICA_IS_NOT_READY: its first store is in progress.
    -704: Meaning.MISSING,  # OBJECT_NOT_FOUND
    -705: Meaning.BUSY,  # OBJECT_ALREADY_EXISTS: another client stores it at the same time.
    -706: Meaning.BUSY,  # OBJECT_HAS_LEASE
    TORN: Meaning.MISSING,  # LEASE_EXPIRED
    -708: Meaning.BUSY,  # OBJECT_HAS_REPLICATION_TASK
    -714: Meaning.BUSY,  # OBJECT_REPLICA_BUSY
    -800: Meaning.FAILED,  # TRANSFER_FAIL
    -801: Meaning.FAILED,  # Mooncake's own checksum, if it is switched on.
    -900: Meaning.AWAY,  # RPC_FAIL
    MASTER_LATE: Meaning.AWAY,
}
_NUMBERS: dict[Meaning | None, int] = {Meaning.BUSY: errno.EBUSY, Meaning.AWAY: errno.ENOTCONN}


def meaning_of(code: int) -> Meaning | None:
    """Return the meaning of a code; None for success. An unknown failure is one of transfer, which retires the slot."""
    return None if code >= 0 else _MEANINGS.get(code, Meaning.FAILED)


def answer_of(code: int) -> str:
    return f"Mooncake answers {code} ({_MEANINGS.get(code, Meaning.FAILED).value})"


def number_of(code: int) -> int:
    """Return the nearest error number of the system, by whose names failures are counted."""
    return errno.ETIMEDOUT if code == MASTER_LATE else _NUMBERS.get(meaning_of(code), errno.EIO)


def has_ended(code: int) -> bool:
    """Return True if no byte can arrive after this answer."""
    return meaning_of(code) is not Meaning.FAILED and code != TORN


class PoolClient:
    """One connection to a pool. For any thread. Its calls block without the GIL."""

    def __init__(self, store: Any, kept: Any) -> None:
        """`store`: a `MooncakeDistributedStore`; `kept`: the `ReplicateConfig` of what it stores."""
        self._store = store
        self._kept = kept

    def exist(self, names: Sequence[str]) -> list[int]:
        """Return for each name 1, 0, or a code."""
        return list(self._store.batch_is_exist(list(names)))

    def get(self, names: Sequence[str], addresses: Sequence[int], size_bytes: int) -> list[int]:
        """Fill a buffer for each name, and return its number of bytes, or a code."""
        return list(self._store.batch_get_into(list(names), list(addresses), [size_bytes] * len(names)))

    def put(self, names: Sequence[str], addresses: Sequence[int], size_bytes: int) -> list[int]:
        """Store a buffer under each name, replacing an older value: 0, or a code."""
        return list(self._store.batch_upsert_from(list(names), list(addresses), [size_bytes] * len(names), self._kept))

    def remove(self, names: Sequence[str]) -> list[int]:
        """Remove the names, even while they are read: 0, or a code."""
        return list(self._store.batch_remove(list(names), True))

    def close(self) -> None:
        """Leave the pool. During another call this is a segmentation fault."""
        self._store.close()

    def leave(self) -> None:
        """Keep the client open until the process ends: a call hangs, and even the destructor would close it."""
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._store))


def connect(options: MooncakeOptions, tier_name: str) -> PoolClient:
    """Return a client that lends no memory to the pool. Blocks. Raises `ConfigError` and `BackendUnavailable`."""
    module = _imported(options)
    store, kept = module.MooncakeDistributedStore(), module.ReplicateConfig()
    kept.replica_num = options.replicas
    code = store.setup(
        {
            "local_hostname": options.local_host,
            "metadata_server": "P2PHANDSHAKE",
            "global_segment_size": 0,
            "local_buffer_size": 0,  # Staging takes its place.
            "protocol": options.protocol,
            "rdma_devices": ",".join(options.devices),
            "master_server_addr": options.master,
            "tenant_id": options.tenant,
        }
    )
    if code != 0:
        raise BackendUnavailable(f"{tier_name}: the master {options.master} does not answer: Mooncake's setup: {code}")
    return PoolClient(store, kept)


def environment(options: MooncakeOptions) -> dict[str, str]:
    """Return the environment variables for Mooncake. The first tier of a process decides for all of them."""
    whole_s = str(transfer_s_max(options))
    return {
        "MC_TCP_STATUS_TIMEOUT_SEC": whole_s,
        "MC_TCP_PROGRESS_TIMEOUT_SEC": whole_s,
        "MC_RPC_TIMEOUT_MS": str(max(1, round(options.timeout_s * 1e3))),
        "MC_RPC_CONNECT_TIMEOUT_MS": str(max(1, round(min(options.timeout_s, 1.0) * 1e3))),
        "MC_STORE_CLIENT_SETUP_RETRIES": "1",  # Its 20 take a minute and a half; the engine tries again anyway.
        "MC_TCP_BIND_ADDRESS": options.local_host,
    }


def transfer_s_max(options: MooncakeOptions) -> int:
    """Return Mooncake's own time-out of a transfer: whole seconds, mostly below the tier's."""
    return max(1, math.floor(options.timeout_s))


def _imported(options: MooncakeOptions) -> Any:
    os.environ.update(environment(options))
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")  # Its least; it logs to standard error.
    try:
        return importlib.import_module("mooncake.store")
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"type: 'mooncake' needs the package {PACKAGE}: pip install 'kvtier[mooncake]' "
            f"(with CUDA, mooncake-transfer-engine instead): {error}"
        ) from error
    except ImportError as error:  # The wheel leaves some libraries to the system.
        raise ConfigError(
            f"type: 'mooncake': the package is installed and cannot be loaded: {error}; Debian and Ubuntu have what "
            "it needs in libibverbs1, libnuma1 and libcurl4"
        ) from error
