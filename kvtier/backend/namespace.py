"""Keys, and the names of chunks that follow from them and from the facts that give bytes their meaning.

A key is a chunk's hash followed by its KV-cache group, as raw bytes: it is hashed millions of times a second, and the
garbage collector skips it. The format is vLLM's (`make_offload_key` in `vllm/v1/kv_offload/base.py`).

Two models that share a tier never meet, because the facts are part of every name. Names are those of vLLM's own file
tier, to the byte (0.32: `vllm/v1/kv_offload/file_mapper.py` and `tiering/fs/manager.py`), so each can read the other's
chunks. Facts that vLLM leaves out of its names, such as the layout of a row, go into the fingerprint, which a tier
stores with each chunk and compares at every load.

There are two ways to name files. `vllm` makes almost one directory a file. `flat` makes at most 256: enough for threads
not to wait for each other, and few enough for fast scans. Each naming has its own folder, as have segments.
"""

import hashlib
import json
import re
from array import array
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal, NamedTuple, NewType

import msgspec

from kvtier.errors import ConfigError
from kvtier.settings import Checked, Count, Index, PositiveSize
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
    """Return True if all keys are of one group, in prefix order, given that they are ordered by group."""
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


Attention = Literal["full_attention", "sliding_window", "chunked_local", "mla", "mamba", "other"]

DIGEST_CHARACTERS = 12
NAME_BYTES_MAX = 255  # A folder's name on every Linux file system.

HEADS_OUTERMOST = "BHLNC"  # vLLM's layout with a block's heads outside of its layers.

_FACTS = (
    "tp_size pp_size pcp_size dcp_size rank inference_engine replicated_layout canonical_format layout row_bytes"
    " parallel_agnostic is_parallelism_agnostic certified kv_heads_per_rank total_kv_heads per_token_head_scales"
    " v2_model_runner interop"
)


class Group(Checked, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One KV-cache group: layers that share blocks."""

    facts: ClassVar[frozenset[str]] = frozenset({"attention"})

    tokens_per_block: Count = 16  # Tokens in a block.
    layer_names: tuple[str, ...] = ()  # The layers, by the LLM engine's names.
    attention: Attention | None = None  # None: not known. Not part of any name.


class Namespace(Checked, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The facts that decide what a chunk's bytes mean.

    The first ones are vLLM's and make up the names. `None`: not known; then sharing between parallel sizes is refused,
    unless `is_parallelism_agnostic`. A file names the model, what a chunk covers and its data type.
    """

    facts: ClassVar[frozenset[str]] = frozenset(_FACTS.split())

    model_name: str  # Name of the model; `"default"` without a namespace.
    tokens_per_hash: Count = 16  # Tokens that one hash covers.
    blocks_per_chunk: Count = 1  # Blocks in a chunk: KV of this many times `tokens_per_hash` tokens.
    tp_size: Count = 1
    pp_size: Count = 1
    pcp_size: Count = 1
    dcp_size: Count = 1
    rank: Index = 0
    dtype: str = "bfloat16"  # Data type of the KV cache, which need not be the model's.
    kv_cache_groups: tuple[Group, ...] = ()  # KV-cache groups: layers that share blocks.
    inference_engine: str = "vllm"
    replicated_layout: bool = False  # Every worker's bytes are the same, and a row holds them once.
    canonical_format: str | None = None  # Name of the topology-free page format, e.g. "v1-nhd"; None: workers' own.

    # In names only when given, so that names stay vLLM's own otherwise.
    weights_revision: str | None = None  # Revision of the weights, in names only if given.
    adapter: str | None = None  # Adapter (LoRA), in names only if given.

    # In the fingerprint only.
    layout: str | None = None  # Order of a row's axes in vLLM's words, e.g. "LBHNC".
    row_bytes: PositiveSize | None = None

    # These decide if caches of different parallel sizes may meet.
    parallel_agnostic: bool = False  # Asked for; granted where `FileMapper.parallel_agnostic` says so.
    is_parallelism_agnostic: bool | None = None  # The LLM engine's own verdict; ours is never more generous.
    certified: bool = False  # Every layer's canonical page was found to be free of the topology.
    kv_heads_per_rank: Count | None = None
    total_kv_heads: Count | None = None
    per_token_head_scales: bool | None = None
    v2_model_runner: bool | None = None
    interop: Literal["vllm"] | None = None
    """`vllm`: one worker's rows get vLLM's names, which rows of other parallel sizes may have, too."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.model_name:
            raise ConfigError("model_name: '' given, a name accepted: without one, two models would share their chunks")
        if "\0" in self.model_name:
            raise ConfigError(f"model_name: {self.model_name!r} given, a name without NUL bytes accepted")
        _require_short(f"{_safe(self.model_name)}_{'0' * DIGEST_CHARACTERS}_r{self.rank}")


class FileMapper:
    """Maps each chunk's key to one name in a namespace, and back. Names are relative and stay in their folder."""

    def __init__(self, namespace: Namespace, naming: NamingKind = "vllm") -> None:
        self.namespace = namespace
        self.naming: NamingKind = naming
        self.why = refusal(namespace)  # Reason why parallel sizes do not share names; empty if they do.
        self.parallel_agnostic = not self.why
        fields = _fields(namespace, parallel_agnostic=self.parallel_agnostic)
        rank = 0 if self.parallel_agnostic else namespace.rank
        digest = hashlib.sha256(_canonical(fields)).hexdigest()[:DIGEST_CHARACTERS]
        self.folder = f"{_safe(namespace.model_name)}_{digest}"
        """`<model>_<12 hex of sha256>`"""
        self.config_name = f"{self.folder}/config.json"
        self.config_bytes = json.dumps(fields, indent=2, sort_keys=True).encode()
        """Text of the file `config_name`: the fields of the folder's digest, for people."""
        self.fingerprint = hashlib.sha256(_canonical(_facts(namespace, fields, rank))).digest()
        """32 bytes over everything known that decides what a chunk's bytes mean."""
        self._naming = NAMINGS[naming]
        self.chunks_folder = f"{self.folder}_r{rank}{self._naming.suffix}"
        """The folder of the chunks: the first part of every name."""
        self._prefix = f"{self.chunks_folder}/"
        _require_short(self.chunks_folder)

    def name(self, key: OffloadKey) -> str:
        """Return a chunk's name. Raises ValueError for an invalid key.

        vLLM's is `<folder>_r<rank>/<hhh>/<hh>_g<group>/<hash hex>.bin`, the flat one
        `<folder>_r<rank>_flat/<hh>/<hash hex>_g<group>.bin`.
        """
        if len(key) < GROUP_BYTES:
            raise ValueError(f"a key of {len(key)} bytes has no group: {key.hex()!r}")
        return self._prefix + self._naming.name(key)

    def key_bytes_max(self, name_bytes: int) -> int:
        """Return the longest key whose file's name, without folders, has up to `name_bytes`."""
        return (name_bytes - self._naming.besides_bytes) // 2 + GROUP_BYTES

    def key(self, name: str) -> OffloadKey | None:
        """Return the key of a name, with or without the empty hash's empty folder; None for any other name."""
        return self._naming.key(name[len(self._prefix) :]) if name.startswith(self._prefix) else None


def refusal(namespace: Namespace) -> str:
    """Return why rows depend on the parallel sizes, which must then be part of names; empty if they do not.

    A row is its workers' bytes in order. It is the same at every size in three cases: pages are certified as canonical,
    all workers' bytes are the same, or the heads, which are divided among workers, are the outermost axis of the row.
    vLLM 0.32 also shares rows whose outermost axis is the layer: size checks pass, and heads land in other layers
    (vllm-project/vllm#55191). Names differ from vLLM's in that one case, unless `interop` asks for vLLM's names of one
    worker. That option vouches that no LLM engine of another size writes there.
    """
    if not namespace.parallel_agnostic:
        return "not asked for"
    workers = namespace.tp_size * namespace.pp_size * namespace.pcp_size * namespace.dcp_size
    if namespace.interop == "vllm" and namespace.is_parallelism_agnostic and workers == 1:
        return ""
    if namespace.is_parallelism_agnostic is False and not namespace.replicated_layout:
        return "the LLM engine reports that its rows depend on the parallel sizes"
    if namespace.pcp_size > 1 or namespace.dcp_size > 1:
        return "context parallelism divides a block's tokens"
    if namespace.pp_size > 1:
        return "pipeline parallelism divides a block's layers"
    if namespace.canonical_format is not None:
        vouched = namespace.certified or namespace.is_parallelism_agnostic
        return "" if vouched else "the canonical pages are not certified"
    if namespace.replicated_layout:
        latent = all(group.attention in ("mla", None) for group in namespace.kv_cache_groups)
        return "" if latent else "only MLA's latent KV is the same in every worker"
    return _refusal_of_workers_own(namespace)


def _refusal_of_workers_own(namespace: Namespace) -> str:
    """Return why rows of workers' own pages, each with its share of the heads, depend on the number of workers."""
    if len(namespace.kv_cache_groups) != 1:
        return f"{len(namespace.kv_cache_groups)} KV-cache groups; only a single one is laid out alike at every size"
    attention = namespace.kv_cache_groups[0].attention
    heads, total = namespace.kv_heads_per_rank, namespace.total_kv_heads
    facts = ("kv_heads_per_rank", "total_kv_heads", "per_token_head_scales", "v2_model_runner")
    unknown = ["attention"] if attention is None else []
    unknown += [fact for fact in facts if getattr(namespace, fact) is None]
    if unknown and not namespace.is_parallelism_agnostic:
        return f"not known: {', '.join(unknown)}"
    if attention not in ("full_attention", None):
        return f"the group's attention is {attention}, not full_attention"
    if heads is not None and total is not None and heads * namespace.tp_size != total:
        return f"{namespace.tp_size} workers of {heads} KV heads hold copies: there are {total}"
    if namespace.per_token_head_scales:
        return "scales per token and head lie apart from the heads"
    if namespace.v2_model_runner:
        return "vLLM's V2 model runner may lay out rows differently"
    if namespace.layout != HEADS_OUTERMOST:
        return f"heads are outermost in layout {HEADS_OUTERMOST} only; this one is {namespace.layout or 'not known'}"
    if namespace.blocks_per_chunk > 1:
        return f"the {namespace.blocks_per_chunk} blocks of a chunk lie outside of the heads"
    return ""


def _fields(namespace: Namespace, *, parallel_agnostic: bool) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "model_name": namespace.model_name,
        "tokens_per_hash": namespace.tokens_per_hash,
        "blocks_per_file": namespace.blocks_per_chunk,
        "tp_size": 1 if parallel_agnostic else namespace.tp_size,
        "pp_size": 1 if parallel_agnostic else namespace.pp_size,
        "pcp_size": 1 if parallel_agnostic else namespace.pcp_size,
        "dcp_size": 1 if parallel_agnostic else namespace.dcp_size,
        "dtype": namespace.dtype,
        "kv_cache_groups": [
            {"tokens_per_block": group.tokens_per_block, "layer_names": list(group.layer_names)}
            for group in namespace.kv_cache_groups
        ],
        "inference_engine": namespace.inference_engine,
    }
    sometimes = {
        "parallel_agnostic": None if parallel_agnostic else False,
        "replicated_layout": namespace.replicated_layout or None,
        "canonical_format": namespace.canonical_format,
        "weights_revision": namespace.weights_revision,
        "adapter": namespace.adapter,
    }
    return fields | {name: value for name, value in sometimes.items() if value is not None}


def _facts(namespace: Namespace, fields: dict[str, Any], rank: int) -> dict[str, Any]:
    """Return the facts of the fingerprint: the names' fields, and all else known of the bytes."""
    return {
        "version": 1,  # Increment it when a field below changes its meaning: old chunks become misses.
        "fields": fields,
        "rank": rank,
        "layout": namespace.layout,
        "row_bytes": namespace.row_bytes,
        # Canonical pages are the same under either model runner; workers' own bytes are not (vllm-project/vllm#49440).
        "v2_model_runner": namespace.v2_model_runner if namespace.canonical_format is None else None,
    }


def _canonical(fields: dict[str, Any]) -> bytes:
    return json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()


def _require_short(folder: str) -> None:
    if (name_bytes := len(folder.encode())) > NAME_BYTES_MAX:
        raise ConfigError(f"model_name: makes a folder's name of {name_bytes} bytes, at most {NAME_BYTES_MAX} accepted")


def _safe(model_name: str) -> str:
    """Return the model's part of a folder's name. The digest behind it makes even `..` a plain name."""
    return model_name.replace("/", "_")


class PackedKeys(msgspec.Struct, frozen=True, array_like=True):
    """Joined keys. `length` is that of every key, or 0 if they differ: then `lengths` has each one's (u32)."""

    joined: bytes
    length: int
    lengths: bytes = b""


def pack_keys(keys: Sequence[OffloadKey]) -> PackedKeys:
    joined = b"".join(keys)
    if not keys:
        return PackedKeys(joined, 0)
    sizes = set(map(len, keys))
    if len(sizes) == 1 and 0 not in sizes:
        return PackedKeys(joined, sizes.pop())
    return PackedKeys(joined, 0, array("I", map(len, keys)).tobytes())


def unpack_keys(packed: PackedKeys) -> list[OffloadKey]:
    joined, length = packed.joined, packed.length
    if length:
        return [OffloadKey(joined[start : start + length]) for start in range(0, len(joined), length)]
    keys: list[OffloadKey] = []
    start = 0
    for size in array("I", packed.lengths):
        keys.append(OffloadKey(joined[start : start + size]))
        start += size
    return keys
