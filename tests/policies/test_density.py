"""What density does for an owner that never ranks: nobody tells it that a request has ended."""

from kvtier.policies.density import DensityOrder

RESIDENT = 5_000  # More than may wait for their requests' ends.
CALLS = 40_000


def test_an_order_that_nobody_ranks_forgets_what_has_gone_and_stays_an_lru() -> None:
    """A tier that is only written to hears of no request's end. Each store would be remembered for ever."""
    order = DensityOrder(16, list(range(RESIDENT)), numbers=RESIDENT, warm_up_requests=1)
    for number in range(RESIDENT):
        order.insert([number])
    for call in range(CALLS):
        assert order.evict(1, lambda key: 0) == [call % RESIDENT]
        order.insert([call % RESIDENT])
    remembered = sum(map(len, order._aging))  # pyright: ignore[reportPrivateUsage]
    assert remembered < 2 * RESIDENT
