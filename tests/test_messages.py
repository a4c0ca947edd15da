import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.bridge.messages import Code, code_of
from kvtier.bridge.packing import PackedKeys, pack_keys, pack_rows, unpack_keys, unpack_rows
from kvtier.errors import BlockCorrupt, BlockError, BlockMissing, NoSpace, TransferFailed
from kvtier.keys import OffloadKey

keys = st.binary(max_size=40).map(OffloadKey)


@given(st.lists(keys, max_size=100))
def test_keys_are_unpacked_as_they_were_packed(keys: list[OffloadKey]) -> None:
    assert unpack_keys(pack_keys(keys)) == keys


@given(st.lists(st.integers(0, 2**32 - 1), max_size=100))
def test_rows_are_unpacked_as_they_were_packed(rows: list[int]) -> None:
    assert list(unpack_rows(pack_rows(rows))) == rows


def test_keys_of_one_length_need_no_table_of_lengths() -> None:
    assert pack_keys([OffloadKey(b"ab"), OffloadKey(b"cd")]) == PackedKeys(b"abcd", 2)


def test_keys_that_are_all_empty_are_not_forgotten() -> None:
    assert unpack_keys(pack_keys([OffloadKey(b"")] * 3)) == [b"", b"", b""]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (BlockMissing("gone"), Code.MISSING),
        (BlockCorrupt("rotten"), Code.CORRUPT),
        (NoSpace("full"), Code.NO_SPACE),
        (TransferFailed("broken"), Code.FAILED),
        (BlockError("of a kind that is not known here"), Code.FAILED),
    ],
)
def test_each_error_has_its_code(error: BlockError, code: Code) -> None:
    assert code_of(error) is code
