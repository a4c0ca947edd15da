"""The seal that hides rows: AES-256 in Galois/counter mode (NIST SP 800-38D). Needs the extra `kvtier[seal]`.

A nonce must never repeat under one key. Random nonces of 12 bytes might, after weeks of a busy fleet. So each opened
tier seals with its own key, derived from the secret and 16 random bytes, and counts its nonces. A forked process
derives another key. The seal and the whole key of the chunk are authenticated with the row.
"""

import itertools
import os
from collections.abc import Sequence
from functools import lru_cache

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from kvtier.backend.namespace import OffloadKey
from kvtier.backend.seal import (
    KEY_ID_BYTES,
    NONCE_BYTES,
    PROOF_BYTES,
    SALT_BYTES,
    SEAL_BYTES,
    SECRET_BYTES,
    SUM_BYTES,
    Given,
    Seal,
    SealFault,
)

_process = [object()]
os.register_at_fork(after_in_child=lambda: _process.__setitem__(0, object()))


class AESSeal(Seal):
    """Ciphertext with its tag right behind it."""

    kind_number = 2

    def __init__(self, fingerprint: bytes, row_bytes: int, secrets: Sequence[bytes]) -> None:
        """Seal with the first of the secrets, each of 32 bytes; open rows sealed with any of them."""
        super().__init__(fingerprint, row_bytes, row_bytes + SEAL_BYTES)
        self._secrets = {_key_id(secret): secret for secret in secrets}
        self._key_id = _key_id(secrets[0])
        self._writer = _SealingKey()
        self._cipher = lru_cache(1_024)(self._make_cipher)  # Derived keys that are cached, at some hundred bytes each.

    def close(self, key: OffloadKey, row: memoryview, beside: memoryview) -> list[memoryview]:
        seal = beside[row.nbytes : row.nbytes + SEAL_BYTES]
        if (writer := self._writer).process is not _process[0]:
            writer = self._writer = _SealingKey()
        nonce = next(writer.numbers).to_bytes(NONCE_BYTES, "little")
        self.write(key, seal, Given(b"", self._key_id, writer.salt, nonce), row.nbytes)
        cipher = self._cipher(self._key_id, writer.salt)
        cipher.encrypt_into(nonce, row, _authenticated(seal, key), beside[: row.nbytes + PROOF_BYTES])
        self.sum_up(seal)
        return self.places(row, beside)

    def places(self, row: memoryview, beside: memoryview) -> list[memoryview]:
        return [beside[: row.nbytes + SEAL_BYTES]]

    def open(self, key: OffloadKey, row: memoryview, beside: memoryview) -> SealFault | None:
        seal = beside[row.nbytes : row.nbytes + SEAL_BYTES]
        given = self.read(key, seal, row.nbytes)
        if isinstance(given, SealFault):
            return given
        if given.key_id not in self._secrets:
            return SealFault.KEY
        ciphertext = beside[: row.nbytes + PROOF_BYTES]
        try:
            self._cipher(given.key_id, given.salt).decrypt_into(given.nonce, ciphertext, _authenticated(seal, key), row)
        except InvalidTag:
            return SealFault.PAYLOAD
        return None

    def _make_cipher(self, key_id: bytes, salt: bytes) -> AESGCM:
        return AESGCM(HKDF(SHA256(), SECRET_BYTES, salt, b"kvtier seal: key").derive(self._secrets[key_id]))


class _SealingKey:
    """A salt, and the nonces under it. A forked process must not use its copy."""

    def __init__(self) -> None:
        self.process = _process[0]
        self.salt = os.urandom(SALT_BYTES)
        self.numbers = itertools.count()


def _authenticated(seal: memoryview, key: OffloadKey) -> bytes:
    return bytes(seal[PROOF_BYTES:-SUM_BYTES]) + key


def _key_id(secret: bytes) -> bytes:
    """Derive a name for a secret. It reveals nothing of the secret."""
    return HKDF(SHA256(), KEY_ID_BYTES, None, b"kvtier seal: key id").derive(secret)
