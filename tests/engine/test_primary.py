import pytest

from kvtier.backend.keys import OffloadKey, make_offload_key
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


def owned_rows(primary: Primary) -> list[int]:
    return [*primary.ready.values(), *primary.filling.values(), *primary.quarantined]


def test_each_key_has_a_row_of_its_own(primary: Primary) -> None:
    fill(primary, A, B, C)
    assert sorted(owned_rows(primary)) == [0, 1, 2]
    assert [primary.key(primary.ready[key]) for key in (A, B, C)] == [A, B, C]
    assert primary.rows_free == 0


def test_a_reserved_key_fills_and_is_ready_when_it_is_published(primary: Primary) -> None:
    primary.reserve([A])
    assert (A in primary.filling, A in primary.ready) == (True, False)
    row = primary.row(A)
    assert primary.publish([A, B]) == [A]
    assert (A in primary.filling, A in primary.ready) == (False, True)
    assert primary.row(A) == row


def test_room_is_made_by_evicting_the_coldest(primary: Primary) -> None:
    for key in (A, B, C):
        fill(primary, key)
    assert primary.reserve([D]) == [A]
    assert primary.row(A) is None
    assert primary.evictions == 1


def test_without_room_for_all_nothing_changes(primary: Primary) -> None:
    fill(primary, A)
    primary.reserve([B])
    primary.pin([primary.row(A)])
    assert primary.reserve([C, D]) is None
    assert (primary.rows_free, primary.evictions) == (1, 0)
    assert primary.row(A) is not None


def test_offered_pinned_filling_and_just_found_keys_stay(primary: Primary) -> None:
    fill(primary, A, B)
    primary.reserve([C])
    primary.pin([primary.row(A)])
    primary.hold([B])
    assert primary.reserve([D]) is None
    primary.end_step()
    assert primary.reserve([D], offered=[B]) is None
    assert primary.reserve([D]) == [B]


def test_an_abandoned_row_is_free_at_once(primary: Primary) -> None:
    primary.reserve([A])
    assert primary.abandon(A, lent=False) is not None
    assert primary.rows_free == 3
    assert primary.abandon(A, lent=False) is None


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


def test_a_lent_row_is_nobodys_until_it_is_released(primary: Primary) -> None:
    primary.reserve([A])
    row = primary.abandon(A, lent=True)
    assert primary.quarantined == {row: 1}
    assert primary.row(A) is None
    assert primary.reserve([A, B, C]) is None
    primary.release(row)
    assert primary.reserve([A, B, C]) == []


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


def test_a_ready_key_that_nothing_holds_can_be_discarded(primary: Primary) -> None:
    (row,) = fill(primary, A)
    primary.pin([row])
    assert not primary.discard(A)
    primary.unpin([row])
    assert primary.discard(A)
    assert not primary.discard(A)
    assert primary.rows_free == 3
    assert primary.reserve([B, C, D]) == []  # The policy has forgotten it, too.


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


def test_clearing_forgets_keys_and_pins_and_quarantines_what_is_lent(primary: Primary) -> None:
    lent, pinned = fill(primary, A, B)
    primary.reserve([C])
    primary.pin([lent, pinned])
    assert primary.clear({lent: 2}) == [A, B]
    assert owned_rows(primary) == [lent]
    assert (primary.rows_free, primary.pinned(pinned)) == (2, False)
    primary.release(lent)
    assert primary.rows_free == 2
    primary.release(lent)
    assert primary.reserve([A, B, C]) == []


def test_clearing_takes_back_rows_that_were_quarantined_and_are_lent_no_more(primary: Primary) -> None:
    primary.reserve([A])
    primary.abandon(A, lent=True)
    primary.clear({})
    assert primary.rows_free == 3
