import pytest

from kvtier.backend.namespace import OffloadKey, make_offload_key
from kvtier.engine.primary import Primary
from kvtier.policies import LRU

A, B = make_offload_key(b"a"), make_offload_key(b"b")


@pytest.fixture
def primary():
    primary = Primary(3, LRU(3))
    assert primary.reserve([A]) is not None
    primary.publish([A])
    return primary


@pytest.mark.parametrize("ends", [("release", "unpin", "unpin"), ("unpin", "release", "unpin"), ("unpin", "unpin")])
def test_an_abandoned_row_is_free_when_it_is_neither_pinned_nor_lent(primary, ends):
    primary.reserve([B])
    row = primary.row(B)
    primary.pin([row, row])
    primary.abandon(B, lent="release" in ends)
    for end in ends:
        assert primary.rows_free == 1
        primary.release(row) if end == "release" else primary.unpin([row])
    assert (primary.rows_free, primary.pinned(row)) == (2, False)


def test_keys_that_come_from_elsewhere_are_known_by_the_objects_that_are_kept(primary):
    copies = [OffloadKey(bytes(bytearray(key))) for key in (A, B)]
    assert copies[0] is not A
    own = primary.own(copies)
    assert own == [A, B]
    assert (own[0] is A, own[1] is copies[1]) == (True, True)
