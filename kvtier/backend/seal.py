"""The seal: 128 bytes behind a row that left the host, so that nothing else can be taken for the chunk.

There are two kinds. `xxh3` finds chunks that were damaged, mixed up or written by another program; anybody who can
write there can still forge it. `aes-256-gcm` also keeps the row secret. Nobody without the key can forge it. It needs
the extra `kvtier[seal]`.

Little-endian: proof 16, magic 8, version u16, kind u8, zero u8, row length u64, namespace fingerprint 32, XXH3-128 of
the key 16, key id 8, salt 16, nonce 12, XXH3-64 of all bytes before it 8. The proof is the row's XXH3-128, or the
GCM tag, right behind the ciphertext so that both are one buffer. Magic, version and the last sum keep their places
in every version. Checksums have seed 0 (https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md).
"""

import base64
import binascii
import importlib
import struct
from abc import ABC, abstractmethod
from collections.abc import Iterable
from enum import StrEnum
from typing import Literal, NamedTuple

from xxhash import xxh3_64_intdigest, xxh3_128_digest

from kvtier.backend.contract import Options
from kvtier.backend.keys import OffloadKey
from kvtier.errors import ChunkCorrupt, ChunkError, ChunkMissing, ConfigError
from kvtier.settings import SecretName, SecretPath, open_secret, secret_variable

SEAL_BYTES = 128
SECRET_BYTES = 32
SECRETS_BYTES_MAX = 64 << 10  # A thousand keys; a file that is longer is another file.

MAGIC = b"\x89kvseal\n"  # Not text, and damaged by whatever rewrites line ends.
VERSION = 1

_LAYOUT = struct.Struct("<16s8sHBxQ32s16s8s16s12s")
_VERSION = struct.Struct("<H")
_SUM = struct.Struct("<Q")
PROOF_BYTES, SALT_BYTES, NONCE_BYTES, KEY_ID_BYTES = 16, 16, 12, 8
SUM_BYTES = _SUM.size
assert _LAYOUT.size + SUM_BYTES == SEAL_BYTES

SealKind = Literal["xxh3", "aes-256-gcm"]


class SealFault(StrEnum):
    """The ways in which a stored value is not the chunk, as they are counted and shown."""

    LENGTH = "length"  # Not a row and a seal long.
    FOREIGN = "foreign"  # No seal of ours.
    SEAL = "seal"  # A seal of ours, damaged.
    SWAPPED = "swapped"  # Another key's chunk.
    NAMESPACE = "namespace"  # The key's chunk of another model, layout or row length.
    PAYLOAD = "payload"  # The bytes are not those that were stored.
    VERSION = "version"  # A seal that this version does not know: not corrupt, and left alone.
    KIND = "kind"  # Sealed otherwise than this tier is told to: left alone.
    KEY = "key"  # Sealed with a key that this tier was not given: left alone.

    @property
    def corrupt(self) -> bool:
        """Whether the value is of no use to anybody, and may be deleted."""
        return self not in (SealFault.VERSION, SealFault.KIND, SealFault.KEY)

    def outcome(self, key: OffloadKey) -> ChunkError:
        """Return the outcome of a load that met it."""
        return (ChunkCorrupt if self.corrupt else ChunkMissing)(f"{key.hex()}: {_WORDS[self]}")


_WORDS = {
    SealFault.LENGTH: "what is stored is not as long as a row and its seal",
    SealFault.FOREIGN: "what is stored has no seal of kvtier's",
    SealFault.SEAL: "the seal is damaged",
    SealFault.SWAPPED: "what is stored is another key's chunk",
    SealFault.NAMESPACE: "what is stored belongs to another model, layout or length of rows",
    SealFault.PAYLOAD: "the bytes are not those that were sealed",
    SealFault.VERSION: "sealed by a version of kvtier that this one does not know",
    SealFault.KIND: "sealed with another kind of seal than this tier's option `seal`",
    SealFault.KEY: "sealed with a key that this tier was not given",
}


class SealOptions(Options, frozen=True, kw_only=True):
    """The seal of rows that leave the host. No key is part of a configuration, which is logged and sent about."""

    seal: SealKind = "xxh3"
    """`xxh3` finds damage. `aes-256-gcm` also hides rows, and refuses what somebody without the key has written."""

    seal_key_file: SecretPath | None = None
    """Keys for `aes-256-gcm`, one a line, each 32 bytes in hex or base64: the first seals, all of them open.
    Nobody else may read the file."""

    seal_key_env: SecretName | None = None
    """Name of an environment variable that holds the keys, instead of a file."""

    def __post_init__(self) -> None:
        """Refuse keys that are not used, and a cipher without any."""
        super().__post_init__()
        given = [name for name in ("seal_key_file", "seal_key_env") if getattr(self, name) is not None]
        if self.seal == "xxh3" and given:
            raise ConfigError(f"{given[0]}: no use with seal = 'xxh3'; seal = 'aes-256-gcm' has keys")
        if self.seal == "aes-256-gcm" and len(given) != 1:
            raise ConfigError(
                "seal: 'aes-256-gcm' given, which needs either seal_key_file or seal_key_env"
                + (", not both" if given else "")
            )

    def doubts(self) -> Iterable[str]:
        """Yield why the keys cannot be read."""
        try:
            if self.seal != "xxh3":
                self._secrets()
        except ConfigError as error:
            yield str(error)

    def make_seal(self, fingerprint: bytes, row_bytes: int) -> "Seal":
        """Return the seal of a tier with these rows. It reads the keys: not for the loop. Raises `ConfigError`."""
        if self.seal == "xxh3":
            return XXH3Seal(fingerprint, row_bytes)
        try:
            aes = importlib.import_module("kvtier.backend.aes")
        except ImportError as error:
            raise ConfigError(f"seal: 'aes-256-gcm' needs the extra kvtier[seal]: {error}") from error
        made: Seal = aes.AESSeal(fingerprint, row_bytes, self._secrets())
        return made

    def _secrets(self) -> list[bytes]:
        if self.seal_key_file is not None:
            return read_secrets(_text_of(self.seal_key_file), "seal_key_file")
        text = secret_variable("seal_key_env", str(self.seal_key_env)).decode(errors="replace")
        return read_secrets(text, "seal_key_env")


class Seal(ABC):
    """Seals rows of one length in one namespace, and says whether a row that came back is the chunk. For any thread.

    Each call has a buffer of `beside_bytes` to itself, beside the row: for the seal, or for all that goes out.
    """

    kind_number: int  # As it is written in the seal.

    def __init__(self, fingerprint: bytes, row_bytes: int, beside_bytes: int) -> None:
        """Take the namespace's fingerprint, of 32 bytes."""
        self._fingerprint = fingerprint
        self.row_bytes = row_bytes
        self.sealed_bytes = row_bytes + SEAL_BYTES
        """Length of what goes out for each row."""
        self.beside_bytes = beside_bytes

    @abstractmethod
    def close(self, key: OffloadKey, row: memoryview, beside: memoryview) -> list[memoryview]:
        """Seal a row, and return the bytes that go out, in order: parts of the two buffers."""

    @abstractmethod
    def places(self, row: memoryview, beside: memoryview) -> list[memoryview]:
        """Return the places for the bytes that come back, in order: parts of the two buffers."""

    @abstractmethod
    def open(self, key: OffloadKey, row: memoryview, beside: memoryview) -> SealFault | None:
        """Say what is wrong with the bytes that came back to their places; None: the row is the chunk, bit for bit.

        If something is wrong, the row is undefined.
        """

    def write(self, key: OffloadKey, into: memoryview, given: "Given") -> None:
        """Fill in a seal."""
        _LAYOUT.pack_into(
            *(into, 0, given.proof, MAGIC, VERSION, self.kind_number, self.row_bytes, self._fingerprint),
            *(xxh3_128_digest(key), given.key_id, given.salt, given.nonce),
        )
        self.sum_up(into)

    def sum_up(self, seal: memoryview) -> None:
        """Fill in the sum of a seal's other bytes."""
        _SUM.pack_into(seal, _LAYOUT.size, xxh3_64_intdigest(seal[: _LAYOUT.size]))

    def read(self, key: OffloadKey, seal: memoryview) -> "Given | SealFault":
        """Take a seal apart, as far as it can be judged without the row."""
        proof, magic, version, kind, row_bytes, fingerprint, key_sum, *rest = _LAYOUT.unpack_from(seal)
        if magic != MAGIC:
            return SealFault.FOREIGN
        if _SUM.unpack_from(seal, _LAYOUT.size)[0] != xxh3_64_intdigest(seal[: _LAYOUT.size]):
            return SealFault.SEAL
        if version != VERSION:
            return SealFault.VERSION
        if key_sum != xxh3_128_digest(key):
            return SealFault.SWAPPED
        if fingerprint != self._fingerprint or row_bytes != self.row_bytes:
            return SealFault.NAMESPACE
        return Given(proof, *rest) if kind == self.kind_number else SealFault.KIND


class Given(NamedTuple):
    """The fields of a seal that depend on its kind."""

    proof: bytes = b""
    key_id: bytes = b""
    salt: bytes = b""
    nonce: bytes = b""


class XXH3Seal(Seal):
    """A checksum: the row goes out and comes back as it is."""

    kind_number = 1

    def __init__(self, fingerprint: bytes, row_bytes: int) -> None:
        super().__init__(fingerprint, row_bytes, SEAL_BYTES)

    def close(self, key: OffloadKey, row: memoryview, beside: memoryview) -> list[memoryview]:
        self.write(key, beside, Given(xxh3_128_digest(row)))
        return [row, beside]

    def places(self, row: memoryview, beside: memoryview) -> list[memoryview]:
        return [row, beside]

    def open(self, key: OffloadKey, row: memoryview, beside: memoryview) -> SealFault | None:
        given = self.read(key, beside)
        if isinstance(given, SealFault):
            return given
        return None if given.proof == xxh3_128_digest(row) else SealFault.PAYLOAD


def of_another_version(seal: bytes) -> bool:
    """Say whether it is a whole seal of kvtier's, of any length, and of a version that this version does not know."""
    if len(seal) < SEAL_BYTES or seal[PROOF_BYTES : PROOF_BYTES + len(MAGIC)] != MAGIC:
        return False
    (version,) = _VERSION.unpack_from(seal, PROOF_BYTES + len(MAGIC))
    whole = _SUM.pack(xxh3_64_intdigest(seal[:-SUM_BYTES])) == seal[-SUM_BYTES:]
    return whole and version != VERSION


def read_secrets(text: str, where: str) -> list[bytes]:
    """Read secrets, one a line in hex or base64; empty lines and lines that begin with # are passed over.

    Raises `ConfigError`. Its message begins with `where`, and shows nothing of the secrets.
    """
    lines = [(number, line.strip()) for number, line in enumerate(text.splitlines(), 1)]
    found = [_secret(line, f"{where}, line {number}") for number, line in lines if line and not line.startswith("#")]
    if not found:
        raise ConfigError(f"{where}: holds no key; one a line accepted, {SECRET_BYTES} bytes in hex or base64")
    return found


def _secret(line: str, where: str) -> bytes:
    try:
        secret = bytes.fromhex(line) if len(line) == 2 * SECRET_BYTES else base64.b64decode(line, validate=True)
    except (ValueError, binascii.Error):
        secret = b""
    if len(secret) != SECRET_BYTES:
        raise ConfigError(f"{where}: no key; {SECRET_BYTES} bytes in hex or base64 accepted")
    return secret


def _text_of(path: str) -> str:
    with open_secret("seal_key_file", path) as file:
        text = file.read(SECRETS_BYTES_MAX + 1)
    if len(text) > SECRETS_BYTES_MAX or not text.isascii():
        raise ConfigError(
            f"seal_key_file: the file is no list of keys: at most {SECRETS_BYTES_MAX:,} bytes of ASCII accepted"
        )
    return text.decode("ascii")
