"""What left the host is believed only if its seal says that it is the chunk, and a cipher's keys can be changed."""

import base64
import contextlib
import os

import pytest

from kvtier.backend import SEAL_BYTES, ConfigError, SealFault, SealOptions
from kvtier.errors import ChunkCorrupt, ChunkMissing
from kvtier.testing.conformance import key_of
from kvtier.testing.conformance.lender import chunk

ROW_BYTES = 8_192
FINGERPRINT = b"\x01" * 32
NEW = b"\x22" * 32
VARIABLE = "KVTIER_TEST_SEAL_KEYS"
MAGIC_AT, VERSION_AT = 16, 24
SALT_AT, NONCE_END = 92, 120


@pytest.fixture(params=["xxh3", "aes-256-gcm"])
def seal(request, monkeypatch):
    if request.param == "xxh3":
        return SealOptions().make_seal(FINGERPRINT, ROW_BYTES)
    return _with_keys(monkeypatch, NEW)


def _with_keys(monkeypatch, *secrets, fingerprint=FINGERPRINT):
    monkeypatch.setenv(VARIABLE, "\n".join(secret.hex() for secret in secrets))
    return SealOptions(seal="aes-256-gcm", seal_key_env=VARIABLE).make_seal(fingerprint, ROW_BYTES)


def _closed(seal, key, version=0):
    row, beside = memoryview(bytearray(chunk(key, version, ROW_BYTES))), memoryview(bytearray(seal.beside_bytes))
    closed = bytearray(b"".join(seal.close(key, row, beside)))
    assert row == chunk(key, version, ROW_BYTES), "the row is lent"
    return closed


def _opened(seal, key, sealed):
    row, beside = memoryview(bytearray(ROW_BYTES)), memoryview(bytearray(seal.beside_bytes))
    for place in seal.places(row, beside):
        place[:], sealed = sealed[: len(place)], sealed[len(place) :]
    assert not sealed
    return seal.open(key, row, beside) or bytes(row)


def test_a_sealed_row_comes_back_bit_for_bit(seal):
    for number in range(4):
        sealed = _closed(seal, key_of(number))
        assert len(sealed) == seal.sealed_bytes == ROW_BYTES + SEAL_BYTES
        assert _opened(seal, key_of(number), sealed) == chunk(key_of(number), 0, ROW_BYTES)


def test_every_flipped_bit_of_a_seal_and_any_of_a_row_is_found(seal):
    sealed = _closed(seal, key_of(1))
    for bit in [*range(0, ROW_BYTES * 8, 4_099), *range(ROW_BYTES * 8, len(sealed) * 8)]:
        sealed[bit // 8] ^= 1 << bit % 8
        assert isinstance(_opened(seal, key_of(1), sealed), SealFault), f"bit {bit:,}"
        sealed[bit // 8] ^= 1 << bit % 8
    assert isinstance(_opened(seal, key_of(1), sealed), bytes)


def test_a_mixture_of_two_stores_is_found(seal):
    first, second = _closed(seal, key_of(1), 1), _closed(seal, key_of(1), 2)
    for at in (64, ROW_BYTES // 2, ROW_BYTES - 64):
        assert _opened(seal, key_of(1), first[:at] + second[at:]) is SealFault.PAYLOAD


def test_bytes_without_a_seal_are_foreign(seal):
    for strange in (bytes(seal.sealed_bytes), os.urandom(seal.sealed_bytes)):
        assert _opened(seal, key_of(1), strange) is SealFault.FOREIGN


def test_another_namespaces_chunk_is_refused(monkeypatch):
    other = SealOptions().make_seal(b"\x02" * 32, ROW_BYTES)
    mine = SealOptions().make_seal(FINGERPRINT, ROW_BYTES)
    assert _opened(mine, key_of(1), _closed(other, key_of(1))) is SealFault.NAMESPACE
    other = _with_keys(monkeypatch, NEW, fingerprint=b"\x02" * 32)
    mine = _with_keys(monkeypatch, NEW)
    assert _opened(mine, key_of(1), _closed(other, key_of(1))) is SealFault.NAMESPACE


def test_a_later_versions_seal_is_a_miss_and_not_corrupt(seal):
    sealed = _closed(seal, key_of(1))
    sealed[ROW_BYTES + VERSION_AT] = 2
    seal.sum_up(memoryview(sealed)[ROW_BYTES:])
    fault = _opened(seal, key_of(1), sealed)
    assert fault is SealFault.VERSION
    assert isinstance(fault.outcome(key_of(1)), ChunkMissing)


def test_damage_is_corrupt_and_a_missing_key_is_a_miss():
    outcomes = {fault: type(fault.outcome(key_of(1))) for fault in SealFault}
    missing = {fault for fault, outcome in outcomes.items() if outcome is ChunkMissing}
    assert missing == {SealFault.VERSION, SealFault.KIND, SealFault.KEY}
    assert {outcomes[fault] for fault in SealFault if fault.corrupt} == {ChunkCorrupt}


def test_a_cipher_hides_the_row_and_never_repeats_itself(monkeypatch):
    seal, row = _with_keys(monkeypatch, NEW), chunk(key_of(1), 0, ROW_BYTES)
    first, second = _closed(seal, key_of(1)), _closed(seal, key_of(1))
    elsewhere = _closed(_with_keys(monkeypatch, NEW), key_of(1))
    parts = [bytes(sealed[at : at + 32]) for sealed in (first, second, elsewhere) for at in range(0, ROW_BYTES, 32)]
    assert len(set(parts)) == len(parts)
    assert not {row[at : at + 32] for at in range(0, ROW_BYTES, 32)} & set(parts)


def test_a_forked_process_never_repeats_its_parents_nonces(outside, monkeypatch):
    """Two rows under one key and one nonce tell each other's bytes, and forge the seal."""
    seal = _with_keys(monkeypatch, NEW)
    _closed(seal, key_of(1))
    ours, theirs = os.pipe()
    if not (child := os.fork()):
        with contextlib.suppress(BaseException):
            os.write(theirs, _closed(seal, key_of(1))[ROW_BYTES:])
        os._exit(0)
    os.waitpid(child, 0)
    forked, parent = os.read(ours, SEAL_BYTES), _closed(seal, key_of(1))[ROW_BYTES:]
    os.close(ours)
    os.close(theirs)
    assert len(forked) == SEAL_BYTES
    assert forked[SALT_AT:NONCE_END] != parent[SALT_AT:NONCE_END]


def test_each_kind_of_seal_rejects_the_other(monkeypatch):
    plain, cipher = SealOptions().make_seal(FINGERPRINT, ROW_BYTES), _with_keys(monkeypatch, NEW)
    assert _opened(cipher, key_of(1), _closed(plain, key_of(1))) is SealFault.KIND
    assert _opened(plain, key_of(1), _closed(cipher, key_of(1))) is SealFault.KIND


@pytest.mark.parametrize("written", [NEW.hex(), base64.b64encode(NEW).decode(), f"# ours\n\n  {NEW.hex()}  \n"])
def test_keys_are_read_from_a_file_in_hex_or_base64(tmp_path, monkeypatch, written):
    path = tmp_path / "keys"
    path.write_text(written)
    path.chmod(0o600)
    options = SealOptions(seal="aes-256-gcm", seal_key_file=str(path))
    sealed = _closed(options.make_seal(FINGERPRINT, ROW_BYTES), key_of(1))
    assert _opened(_with_keys(monkeypatch, NEW), key_of(1), sealed) == chunk(key_of(1), 0, ROW_BYTES)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"seal": "xxh3", "seal_key_env": VARIABLE}, "seal_key_env: no use with seal = 'xxh3'"),
        ({"seal": "aes-256-gcm"}, "needs either seal_key_file or seal_key_env"),
        ({"seal": "aes-256-gcm", "seal_key_env": "A", "seal_key_file": "/b"}, "not both"),
        ({"seal": "sha1"}, "seal: 'sha1' given, 'xxh3' or 'aes-256-gcm' accepted"),
    ],
)
def test_options_that_do_not_go_together_are_refused_by_name(options, told):
    with pytest.raises(ConfigError, match=told.replace("(", r"\(")):
        SealOptions(**options)


@pytest.mark.parametrize("text", ["", "# nothing\n", "secret", f"{NEW.hex()}\n{NEW.hex()[:-2]}", "=" * 44])
def test_invalid_keys_are_refused_and_never_shown(monkeypatch, text):
    monkeypatch.setenv(VARIABLE, text)
    with pytest.raises(ConfigError, match=r"seal_key_env.*32 bytes in hex or base64") as told:
        SealOptions(seal="aes-256-gcm", seal_key_env=VARIABLE).make_seal(FINGERPRINT, ROW_BYTES)
    assert not any(line in str(told.value) for line in text.split())


def test_keys_that_are_not_there_are_a_mistake_of_the_configuration(tmp_path, monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    with pytest.raises(ConfigError, match="has no variable"):
        SealOptions(seal="aes-256-gcm", seal_key_env=VARIABLE).make_seal(FINGERPRINT, ROW_BYTES)
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        SealOptions(seal="aes-256-gcm", seal_key_file=str(tmp_path / "none")).make_seal(FINGERPRINT, ROW_BYTES)
    (tmp_path / "image").write_bytes(os.urandom(100_000))
    (tmp_path / "image").chmod(0o600)
    with pytest.raises(ConfigError, match="bytes of ASCII accepted"):
        SealOptions(seal="aes-256-gcm", seal_key_file=str(tmp_path / "image")).make_seal(FINGERPRINT, ROW_BYTES)
