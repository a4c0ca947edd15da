"""A Mooncake tier's options: the master's address, the transport, and the memory between transport and rows."""

from typing import Annotated, Literal

import msgspec

from kvtier.backend import SealOptions
from kvtier.errors import ConfigError
from kvtier.settings import PositiveDuration, PositiveSize

LANES_MAX = 16  # In each direction; Mooncake has more threads behind each.
REPLICAS_MAX = 16
PREFIX_BYTES_MAX = 128
PORT_MAX = (1 << 16) - 1

Text = Annotated[str, msgspec.Meta(min_length=1)]
Lanes = Annotated[int, msgspec.Meta(ge=1, le=LANES_MAX)]
Replicas = Annotated[int, msgspec.Meta(ge=1, le=REPLICAS_MAX)]
Prefix = Annotated[str, msgspec.Meta(max_length=PREFIX_BYTES_MAX, pattern=r"^[!-~]*$")]


class MooncakeOptions(SealOptions, frozen=True, kw_only=True):
    """A master and how its pool is used. The pool's own configuration decides its capacity and its eviction."""

    master: Text = "127.0.0.1:50051"
    """`host:port` of the master, which knows the place of every chunk."""

    local_host: Text = "127.0.0.1"
    """This host's address on the network of the pool."""

    protocol: Literal["tcp", "rdma"] = "tcp"
    """Transport between this host and the owners of the pool's memory."""

    devices: tuple[Text, ...] = ()
    """RDMA devices, such as `mlx5_0`; nothing: Mooncake chooses."""

    tenant: Text = "default"
    """Name under which the master counts what is stored, where it has several tenants."""

    replicas: Replicas = 1
    """Number of owners that keep each chunk."""

    prefix: Prefix = "kvtier/"
    """Beginning of every name, so that other programs can use the pool, too."""

    staging_bytes: PositiveSize = 256 << 20
    """Most memory between Mooncake and rows, half of it for loads and half for stores."""

    lanes: Lanes = 1
    """Concurrent calls of Mooncake's that move bytes: as many for loads as for stores."""

    timeout_s: PositiveDuration = 5.0
    """Limit of a call's wait for a turn, and again of its wait for the client. After it, rows are free again."""

    def __post_init__(self) -> None:
        super().__post_init__()
        host, _, port = self.master.rpartition(":")
        if not host or not port.isdecimal() or not 1 <= int(port) <= PORT_MAX or "/" in host:
            raise ConfigError(f"master: {self.master!r} given, 'host:port' accepted")
        if self.devices and self.protocol == "tcp":
            raise ConfigError("devices: no use with protocol = 'tcp'; protocol = 'rdma' has devices")
