import pytest

from kvtier.backend.namespace import OffloadKey, make_offload_key
from kvtier.engine.primary import Primary
from kvtier.policies import LRU


def keys_of(names: str) -> list[OffloadKey]:
    return [make_offload_key(name.encode()) for name in names]


A, B, C, D = keys_of("abcd")


@pytest.fixture
def primary() -> Primary:
    """Three rows, all free."""
    return Primary(3, LRU(3))


def fill(primary: Primary, *keys: OffloadKey) -> list[int]:
    """Make keys ready, and return their rows."""
    assert primary.reserve(keys) is not None
    primary.publish(keys)
    return [primary.ready[key] for key in keys]


def test_an_abandoned_row_that_is_pinned_is_free_with_its_last_pin(primary: Primary) -> None:
    primary.reserve([A])
    row = primary.row(A)
    primary.pin([row, row])
    primary.abandon(A, lent=False)
    assert (primary.rows_free, primary.pinned(row)) == (2, True)
    primary.unpin([row])
    assert primary.rows_free == 2
    primary.unpin([row])
    assert (primary.rows_free, primary.pinned(row)) == (3, False)


@pytest.mark.parametrize("released_first", [True, False])
def test_a_lent_row_that_is_pinned_is_free_when_both_have_ended(primary: Primary, released_first: bool) -> None:
    primary.reserve([A])
    row = primary.row(A)
    primary.pin([row])
    primary.abandon(A, lent=True)
    ends = [lambda: primary.release(row), lambda: primary.unpin([row])]
    for end in ends if released_first else reversed(ends):
        assert primary.rows_free == 2
        end()
    assert primary.rows_free == 3


def test_keys_that_come_from_elsewhere_are_known_by_the_objects_that_are_kept(primary: Primary) -> None:
    fill(primary, A)
    copies = [OffloadKey(bytes(bytearray(key))) for key in (A, B)]
    assert copies[0] is not A
    own = primary.own(copies)
    assert own == [A, B]
    assert own[0] is A
    assert own[1] is copies[1]


def test_one_unpin_too_many_is_a_bug_that_shows(primary: Primary) -> None:
    (row,) = fill(primary, A)
    with pytest.raises(AssertionError, match=str(row)):
        primary.unpin([row])
