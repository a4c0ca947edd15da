"""Offload keys, and the names of the files that hold their chunks.

A key is a chunk's hash followed by its KV-cache group, as raw bytes: it is hashed millions of times a second, is never
traversed by the garbage collector, and travels packed between processes. The format is vLLM's own (`make_offload_key`
in `vllm/v1/kv_offload/base.py`).

There are two ways to name files. `vllm` is that of vLLM's own file tier (0.32: `vllm/v1/kv_offload/file_mapper.py`). It
makes almost one directory a file. `flat` makes at most 256 directories: enough for threads not to wait for each other,
and few enough for fast scans and metadata writes. Each naming has its own folder, as have segments, where chunks have
no names.
"""

import re
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, NewType

from kvtier.settings.hints import shown

OffloadKey = NewType("OffloadKey", bytes)

GROUP_BYTES = 4  # Big-endian, unsigned, at the end of the key.
GROUPS = 1 << (8 * GROUP_BYTES)

NamingKind = Literal["vllm", "flat"]
FolderKind = Literal["vllm", "flat", "segments"]

SEGMENTS_SUFFIX = "_segments"  # Of a folder whose chunks are not single files.

_BYTES = frozenset((bytes,))

# The first folder is missing or empty if the hash is.
_VLLM = re.compile(r"(?:([0-9a-f]{1,3})/|/?)([0-9a-f]{0,2})_g(0|[1-9][0-9]{0,9})/([0-9a-f]*)\.bin")
_FLAT = re.compile(r"([0-9a-f]{2})/([0-9a-f]*)_g(0|[1-9][0-9]{0,9})\.bin")
_KINDS: dict[str | None, FolderKind] = {None: "vllm", "_flat": "flat", SEGMENTS_SUFFIX: "segments"}
_FOLDER = re.compile(r"(.+_[0-9a-f]{12})_r(0|[1-9][0-9]{0,9})(_flat|_segments)?", re.DOTALL)


def make_offload_key(chunk_hash: bytes, group_index: int = 0) -> OffloadKey:
    """Join a chunk's hash and the index of its KV-cache group (0 to 2**32 - 1; OverflowError beyond)."""
    return OffloadKey(chunk_hash + group_index.to_bytes(GROUP_BYTES, "big"))


def checked_keys(keys: Sequence[OffloadKey]) -> tuple[OffloadKey, ...]:
    """Return keys as a tuple. Raises TypeError, which names an invalid key and its place."""
    if isinstance(keys, bytes | str):  # Both are sequences, too.
        what = f"one key of {len(keys)} bytes" if isinstance(keys, bytes) else shown(keys)
        raise TypeError(f"keys: {what} given, a sequence of keys accepted: put one key into a list")
    taken = tuple(keys)
    check_keys(taken)
    return taken


def check_keys(keys: Sequence[object]) -> None:
    """Raise TypeError for an invalid key, with its place."""
    if _BYTES.issuperset(map(type, keys)):  # The common case; a subclass of bytes is a key, too.
        return
    for place, key in enumerate(keys):
        if not isinstance(key, bytes):
            accepted = "bytes accepted: make_offload_key makes a key of a hash"
            raise TypeError(f"keys[{place}]: {shown(key)} given, {accepted}")


def chunk_hash(key: OffloadKey) -> bytes:
    return key[:-GROUP_BYTES]


def of_one_group(keys: Sequence[OffloadKey]) -> bool:
    """Return True if all keys are of one group, given that they are ordered by group.

    Keys of one group are in prefix order.
    """
    return not keys or keys[0][-GROUP_BYTES:] == keys[-1][-GROUP_BYTES:]


def group_index(key: OffloadKey) -> int:
    return int.from_bytes(key[-GROUP_BYTES:], "big")


class Naming(NamedTuple):
    """One way to name chunks. Names are relative to the folder, and each key has one."""

    suffix: str  # Of the folder's name, after the rank.
    name: Callable[[OffloadKey], str]
    key: Callable[[str], OffloadKey | None]  # None for any other name.
    besides_bytes: int  # Most bytes of a file's name without the digits of its hash.


class ChunkFolder(NamedTuple):
    """A folder of chunks, parsed from its name."""

    folder: str  # `<model>_<12 hex of sha256>`
    rank: int
    kind: FolderKind


def read_folder(name: str) -> ChunkFolder | None:
    """Parse the name of a folder of chunks, one path component; None for any other."""
    match = _FOLDER.fullmatch(name)
    return match and ChunkFolder(match[1], int(match[2]), _KINDS[match[3]])


def _group_part(group: bytes) -> str:
    return f"_g{int.from_bytes(group, 'big')}"


# Every stored chunk needs a name. Models have few groups: a look-up saves a third of the time.
_GROUP_PARTS = {(part := index.to_bytes(GROUP_BYTES, "big")): _group_part(part) for index in range(32)}


def _vllm_name(key: OffloadKey) -> str:
    """Return `<hhh>/<hh>_g<group>/<hash hex>.bin`."""
    digits, group = key[:-GROUP_BYTES].hex(), key[-GROUP_BYTES:]
    return f"{digits[:3]}/{digits[3:5]}{_GROUP_PARTS.get(group) or _group_part(group)}/{digits}.bin"


def _vllm_key(name: str) -> OffloadKey | None:
    """Invert `_vllm_name`. The empty hash has an empty folder in its name, which a listing omits."""
    if (match := _VLLM.fullmatch(name)) is None:
        return None
    upper, lower, group, digits = match.groups("")
    return _key(digits, group) if upper == digits[:3] and lower == digits[3:5] else None


def _flat_name(key: OffloadKey) -> str:
    """Return `<hh>/<hash hex>_g<group>.bin`; the empty hash is padded with zeros."""
    digits, group = key[:-GROUP_BYTES].hex(), key[-GROUP_BYTES:]
    return f"{digits[:2]:0<2}/{digits}{_GROUP_PARTS.get(group) or _group_part(group)}.bin"


def _flat_key(name: str) -> OffloadKey | None:
    if (match := _FLAT.fullmatch(name)) is None:
        return None
    upper, digits, group = match.groups()
    return _key(digits, group) if upper == f"{digits[:2]:0<2}" else None


def _key(digits: str, group: str) -> OffloadKey | None:
    if len(digits) % 2 or int(group) >= GROUPS:
        return None
    return OffloadKey(bytes.fromhex(digits) + int(group).to_bytes(GROUP_BYTES, "big"))


NAMINGS: dict[NamingKind, Naming] = {
    "vllm": Naming("", _vllm_name, _vllm_key, len(".bin")),
    "flat": Naming("_flat", _flat_name, _flat_key, len(f"_g{GROUPS - 1}.bin")),
}
