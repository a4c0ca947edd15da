import errno

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.backend.namespace import OffloadKey
from kvtier.errors import BackendUnavailable, ChunkCorrupt, ChunkError, ChunkMissing, NoSpace, TransferFailed, cause_of
from kvtier.runner.messages import Code, PackedKeys, code_of, pack_keys, pack_rows, unpack_keys, unpack_rows

keys = st.binary(max_size=40).map(OffloadKey)


@given(st.lists(keys, max_size=100))
def test_keys_are_unpacked_as_they_were_packed(keys):
    assert unpack_keys(pack_keys(keys)) == keys


@given(st.lists(st.integers(0, 2**32 - 1), max_size=100))
def test_rows_are_unpacked_as_they_were_packed(rows):
    assert list(unpack_rows(pack_rows(rows))) == rows


def test_keys_of_one_length_need_no_table_of_lengths_though_all_are_empty():
    assert pack_keys([OffloadKey(b"ab"), OffloadKey(b"cd")]) == PackedKeys(b"abcd", 2)
    assert unpack_keys(pack_keys([OffloadKey(b"")] * 3)) == [b"", b"", b""]


def test_each_error_has_its_code():
    errors = (ChunkMissing(""), ChunkCorrupt(""), NoSpace(""), TransferFailed(""), ChunkError("of an unknown kind"))
    assert list(map(code_of, errors)) == [Code.MISSING, Code.CORRUPT, Code.NO_SPACE, Code.FAILED, Code.FAILED]


def caused(error, cause):
    error.__cause__ = cause
    return error


def handled(error, cause):
    error.__context__ = cause
    return error


READ_ONLY = OSError(errno.EROFS, "Read-only file system")


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (READ_ONLY, "EROFS"),
        (caused(TransferFailed("k"), READ_ONLY), "EROFS"),
        (caused(BackendUnavailable("away"), caused(TransferFailed("k"), OSError(errno.ESTALE, ""))), "ESTALE"),
        (handled(BackendUnavailable("away"), READ_ONLY), "EROFS"),
        (TransferFailed("k"), ""),
        (BackendUnavailable("away"), ""),
        (caused(BackendUnavailable("away"), ZeroDivisionError()), "ZeroDivisionError"),
        (RuntimeError("a bug"), "RuntimeError"),
        (OSError("without a number"), "OSError"),
        (OSError(99_999, "of no name"), "OSError"),
    ],
)
def test_the_cause_of_an_error_is_one_word(error, cause):
    assert cause_of(error) == cause


def test_errors_that_cause_each_other_end():
    one, other = TransferFailed("one"), TransferFailed("other")
    one.__cause__, other.__cause__ = other, one
    assert cause_of(one) == ""
