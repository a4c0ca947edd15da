"""A coded row comes back bit for bit, or is a miss: whoever coded it, and whatever happened to it."""

import struct
import threading

import numpy as np
import pytest
import zstandard

from kvtier import ConfigError
from kvtier.backend import SEAL_BYTES, FileMapper, Namespace, SealFault
from kvtier.backend import codec as coding
from kvtier.backend.codec import RUN_ROWS, TRIAL_RUNS, CodecOptions, Pace, decode, encode
from kvtier.backend.remote import Totals
from kvtier.testing.conformance import key_of
from kvtier.tools.bench import synthetic_kv

ROW_BYTES = 128 << 10
KEYS = "KVTIER_TEST_CODEC_KEYS"
KEY = key_of(1)
HEADER = struct.Struct("<4sB3xQ16s")
FRAME_AT = HEADER.size + ROW_BYTES // 2  # Where the frame of a bfloat16 row begins.
BF16, FP8 = (bytes(synthetic_kv(ROW_BYTES, width)) for width in (2, 1))
NOISE = np.random.default_rng(0).bytes(ROW_BYTES)


@pytest.fixture(params=["xxh3", "aes-256-gcm"])
def sealing(request, monkeypatch):
    monkeypatch.setenv(KEYS, "ab" * 32)
    return {} if request.param == "xxh3" else {"seal": request.param, "seal_key_env": KEYS}


def made(codec, counts=None, dtype="bfloat16", row_bytes=ROW_BYTES, **fields):
    options = CodecOptions(codec=codec, **fields)
    mapper = FileMapper(Namespace(model_name="m", dtype=dtype))
    return options.make_coded(options.make_seal(b"\x01" * 32, row_bytes), mapper, counts or Totals())


def closed(seal, row, **until):
    lent, beside = memoryview(bytearray(row)), memoryview(bytearray(seal.closing_bytes))
    value = b"".join(seal.close(KEY, lent, beside, until.get("code_until", seal.code_until())))
    assert lent == row, "the row is lent"
    assert seal.fits(len(value))
    return value


def opened(seal, value, key=KEY, row_bytes=ROW_BYTES):
    row, beside = memoryview(bytearray(row_bytes)), memoryview(bytearray(seal.opening_bytes(len(value))))
    rest = value
    for place in seal.places(row, beside, len(value)):
        place[:], rest = rest[: len(place)], rest[len(place) :]
    assert not rest
    return seal.open(key, row, beside, len(value)) or bytes(row)


@pytest.mark.parametrize(
    ("codec", "dtype", "row", "least", "most"),
    [("bf16", "int8", BF16, 0.66, 0.72), ("fp8", "bfloat16", FP8, 0.8, 0.89), ("auto", "bfloat16", BF16, 0.66, 0.72)]
    + [("auto", dtype, FP8, 0.8, 0.89) for dtype in ("fp8_e4m3", "float8_e5m2", "int8")],
)
def test_a_row_shrinks_and_comes_back_whatever_codec_the_reader_has(sealing, codec, dtype, row, least, most):
    counts = Totals()
    value = closed(made(codec, counts, dtype, **sealing), row)
    assert least < len(value) / ROW_BYTES < most
    coded_bytes = len(value) - SEAL_BYTES
    assert counts.copy() == {"coded": 1, "coded_bytes": coded_bytes, "coded_saved_bytes": ROW_BYTES - coded_bytes}
    for reader in ("none", "bf16", "fp8", "auto"):
        assert opened(made(reader, **sealing), value) == row


@pytest.mark.parametrize("row", [bytes(ROW_BYTES), b"\xff" * ROW_BYTES, BF16[::-1], FP8, BF16[:-1], b"\0"])
@pytest.mark.parametrize("codec", ["bf16", "fp8"])
def test_every_row_comes_back_bit_for_bit_whatever_its_numbers_and_its_length_are(sealing, codec, row):
    seal = made(codec, row_bytes=len(row), **sealing)
    assert opened(seal, closed(seal, row), row_bytes=len(row)) == row


@pytest.mark.parametrize("codec", ["bf16", "fp8"])
def test_a_row_that_does_not_shrink_or_has_waited_too_long_is_stored_unchanged(sealing, codec):
    for row, until, why in ((NOISE, {}, "codec_no_gain"), (BF16, {"code_until": 0.0}, "codec_busy")):
        counts = Totals()
        value = closed(made(codec, counts, **sealing), row, **until)
        assert (len(value), counts.copy()) == (ROW_BYTES + SEAL_BYTES, {why: 1})
        assert opened(made("none", **sealing), value) == row


def test_every_flipped_byte_and_every_length_is_found(sealing):
    seal = made("bf16", **sealing)
    value = bytearray(closed(seal, BF16))
    coded_bytes = len(value) - SEAL_BYTES
    places = [*range(HEADER.size), *range(0, coded_bytes, 997), *range(FRAME_AT, FRAME_AT + 20)]
    for at in [*places, *range(coded_bytes, len(value))]:
        value[at] ^= 1
        assert isinstance(opened(seal, bytes(value)), SealFault), f"byte {at:,}"
        value[at] ^= 1
    for cut in (1, 100, coded_bytes // 2):
        assert isinstance(opened(seal, bytes(value[:-cut])), SealFault)
        assert isinstance(opened(seal, bytes(value[cut:])), SealFault)
    assert opened(seal, bytes(value), key_of(2)) is SealFault.SWAPPED


def coded():
    return bytearray(encode(memoryview(BF16), 2, memoryview(bytearray(ROW_BYTES))))


def decoded(given, row_bytes=ROW_BYTES):
    return decode(memoryview(given), memoryview(bytearray(row_bytes)))


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ((b"nope", 2, ROW_BYTES, b""), SealFault.NAMESPACE),
        ((coding.MAGIC, 2, 1 << 40, b""), SealFault.NAMESPACE),
        ((coding.MAGIC, 2, ROW_BYTES - 1, b""), SealFault.NAMESPACE),
        ((coding.MAGIC, 0, ROW_BYTES, b""), SealFault.VERSION),
        ((coding.MAGIC, 255, ROW_BYTES, b""), SealFault.VERSION),
        ((coding.MAGIC, 1, ROW_BYTES, b""), SealFault.PAYLOAD),
        ((coding.MAGIC, 2, ROW_BYTES, bytes(16)), SealFault.PAYLOAD),
    ],
)
def test_a_wrong_header_under_a_right_seal_is_a_miss(fields, fault):
    """Another writer, or a later version, can seal anything: a codec that is not known is left alone."""
    given = coded()
    HEADER.pack_into(given, 0, *fields)
    assert decoded(given) is fault
    HEADER.pack_into(given, 0, coding.MAGIC, 2, ROW_BYTES - 1, b"")
    assert decoded(given, ROW_BYTES - 1) is SealFault.VERSION, "numbers that do not divide the row"
    assert fault.corrupt == (fault is not SealFault.VERSION)


@pytest.mark.parametrize("declared", [True, False])
def test_a_bomb_is_rejected_before_it_is_decoded(declared, monkeypatch):
    """A frame of 64 MiB of zeros is a few kilobytes long."""
    bomb = zstandard.ZstdCompressor(write_content_size=declared).compressobj(size=1 << 26 if declared else -1)
    frame = b"".join(bomb.compress(bytes(1 << 20)) for _ in range(1 << 6)) + bomb.flush()
    monkeypatch.setattr(coding._zstandard, "decompress", lambda *_, **__: pytest.fail("a bomb was decoded"))
    assert decoded(coded()[:FRAME_AT] + frame) is SealFault.PAYLOAD


LYING = bytearray(zstandard.ZstdCompressor().compress(bytes(1 << 20)))
LYING[5:9] = (ROW_BYTES // 2).to_bytes(4, "little")  # Its length, behind the magic and the descriptor of one segment.


@pytest.mark.parametrize("frame", [b"", b"\x28", bytes(500), b"\x28\xb5\x2f\xfd" + b"\xff" * 60, LYING])
def test_a_decoders_failure_is_a_miss(frame):
    assert zstandard.frame_content_size(bytes(LYING)) == ROW_BYTES // 2
    for given in (coded()[:FRAME_AT] + frame, coded()[: FRAME_AT - 9], coded() + b"more"):
        assert decoded(given) is SealFault.PAYLOAD


def test_a_decoder_that_errs_is_found_by_the_rows_checksum(sealing, monkeypatch):
    seal = made("bf16", **sealing)
    value, right = closed(seal, BF16), coding._zstandard.decompress
    monkeypatch.setattr(coding._zstandard, "decompress", lambda frame, **fields: right(frame, **fields)[:-1] + b"\x7f")
    assert opened(seal, value) is SealFault.PAYLOAD


def test_a_row_is_stored_unchanged_rather_than_wait_for_a_turn(monkeypatch):
    counts, begun, end = Totals(), threading.Event(), threading.Event()
    seal, right = made("bf16", counts, codec_threads=1), coding.encode

    def slow(*args):
        begun.set()
        assert end.wait(10)
        return right(*args)

    monkeypatch.setattr(coding, "encode", slow)
    thread = threading.Thread(target=closed, args=(seal, BF16))
    thread.start()
    assert begun.wait(10)
    assert len(closed(seal, BF16)) == ROW_BYTES + SEAL_BYTES
    end.set()
    thread.join()
    assert counts.copy()["codec_busy"] == counts.copy()["coded"] == 1


def coded_share(pace, rows=TRIAL_RUNS * RUN_ROWS):
    return sum(pace.choose() for _ in range(rows)) / rows


def learn(pace, calls, jitter=0.0, *, coded_s, unchanged_s):
    """Store and load rows, a run in each call; return the seconds of the loads without the jitter."""
    dice, spent_s = np.random.default_rng(0), 0.0
    for _ in range(calls):
        kinds = [pace.choose() for _ in range(RUN_ROWS)]
        spent_s += (seconds := sum(coded_s if coded else unchanged_s for coded in kinds))
        pace.loaded(seconds * dice.lognormal(0, jitter), kinds)
    return spent_s / RUN_ROWS


@pytest.mark.parametrize(("coded_s", "unchanged_s", "share"), [(1.0, 1.1, 127 / 128), (1.1, 1.0, 1 / 128)])
@pytest.mark.parametrize("offset", [RUN_ROWS, 5], ids=["calls of one kind", "mixed calls"])
def test_auto_stores_what_loads_faster_and_goes_on_trying_the_other(coded_s, unchanged_s, share, offset):
    pace = Pace()
    assert coded_share(pace, 4 * RUN_ROWS) == 3 / 4, "until both are known, it codes, and tries more often"
    for _ in range(100):
        pace.loaded(1.0, [False])
    assert coded_share(pace, 4 * RUN_ROWS) == 3 / 4
    coded_share(pace, offset)
    learn(pace, 2_000, coded_s=coded_s, unchanged_s=unchanged_s)
    assert coded_share(pace) == share
    pace.loaded(9.0, [])
    assert coded_share(pace) == share
    learn(pace, 2_000, coded_s=unchanged_s, unchanged_s=coded_s)
    assert coded_share(pace) == 1 - share


@pytest.mark.parametrize("gb_per_s", [0.2, 1.0, 3.0])
def test_auto_loads_no_slower_than_097_of_the_better_way(gb_per_s):
    """Times of rows on a link, of which a core decodes 1.1 GB/s, with jitter and a call that hangs."""
    pace, seconds = Pace(), {"coded_s": 0.69 / gb_per_s + 1 / 1.1, "unchanged_s": 1 / gb_per_s}
    learn(pace, 100, **seconds)
    pace.loaded(10 * seconds["coded_s"], [True])
    assert 1_000 * min(seconds.values()) / learn(pace, 1_000, 0.3, **seconds) > 0.97


@pytest.mark.parametrize("fields", [{"codec": "zstd"}, {"codec_threads": 0}, {"codec_threads": 65}])
def test_options_out_of_range_are_refused_by_name(fields):
    with pytest.raises(ConfigError, match=next(iter(fields))):
        CodecOptions(**fields)
