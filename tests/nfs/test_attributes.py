"""What a client remembers of attributes and names (`actimeo`), and what hosts know of each other all the same."""

import os
import time

import pytest

ROW_BYTES = 65_536
CAPACITY_BYTES = 8 << 20
AGO_S = 7_200  # Long enough for a use to be written down again.
OPTIONS = {"naming": "flat", "shared": True, "capacity_bytes": CAPACITY_BYTES}


def make_old(root, chunks):
    """Have chunks have been used last some hours ago."""
    then = time.time() - AGO_S
    found = 0
    for folder, _, files in os.walk(root):
        for name in files:
            if name.endswith(".bin"):
                os.utime(os.path.join(folder, name), (then, then))
                found += 1
    assert found == chunks


@pytest.mark.parametrize("actimeo", [0, 3, 60])
def test_what_another_host_has_used_is_spared(guests, open_tier, on_server, actimeo):
    one, other = guests
    how = {"actimeo": actimeo}
    first = open_tier(one, ROW_BYTES, how=how, **OPTIONS)
    assert (one.call("store", first, 0, 64), one.call("close", first)) == ({"whole": 64}, 0)
    make_old(on_server, 64)
    names = [open_tier(guest, ROW_BYTES, how=how, **OPTIONS) for guest in guests]
    for guest, name in zip(guests, names, strict=True):
        assert guest.call("load", name, 63, 1) == {"whole": 1}  # Both have looked at all of it.
    assert one.call("load", names[0], 0, 16) == {"whole": 16}
    one.call("write_uses", names[0])
    stored = 0
    while not other.call("counters", names[1])["evicted"] > 40:  # Few at a time: 47 may go, and not one more.
        other.call("store", names[1], 1_000 + stored, 4)
        stored += 4
    assert other.call("load", names[1], 0, 16) == {"whole": 16}
    for guest, name in zip(guests, names, strict=True):
        assert guest.call("close", name) == 0


@pytest.mark.parametrize(
    ("actimeo", "options", "found"),
    [(0, "soft", 32), (60, "soft,lookupcache=positive", 32), (60, "soft", 1)],
    ids=["actimeo=0", "actimeo=60,lookupcache=positive", "actimeo=60"],
)
def test_a_chunk_that_was_absent_is_found_if_the_client_does_not_remember_absences(
    guests, open_tier, actimeo, options, found
):
    how = {"actimeo": actimeo, "options": options}
    one, other = guests
    names = [open_tier(guest, ROW_BYTES, how=how, **OPTIONS) for guest in guests]
    assert one.call("store", names[0], 0, 1) == {"whole": 1}
    assert other.call("probe", names[1], 0, 32) == 1
    assert one.call("store", names[0], 1, 31) == {"whole": 31}
    assert other.call("probe", names[1], 0, 32) == found
    for guest, name in zip(guests, names, strict=True):
        assert guest.call("close", name) == 0
