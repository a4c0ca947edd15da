import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.backend.namespace import chunk_hash, group_index, make_offload_key


@given(digest=st.binary(max_size=64), group=st.integers(0, 2**32 - 1))
def test_a_key_is_the_hash_followed_by_four_big_endian_bytes(digest, group):
    key = make_offload_key(digest, group)
    assert key == digest + struct.pack(">I", group)
    assert (chunk_hash(key), group_index(key)) == (digest, group)


def test_a_key_without_a_group_belongs_to_the_first_one():
    assert make_offload_key(b"hash") == b"hash\0\0\0\0"


@pytest.mark.parametrize("group", [-1, 2**32])
def test_a_group_that_does_not_fit_is_refused(group):
    with pytest.raises(OverflowError):
        make_offload_key(b"hash", group)
