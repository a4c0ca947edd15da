"""Two hosts and one directory over NFS: each finds what the other has stored, and one capacity is kept by both."""

import os
import time

import pytest

from tests.fs.conftest import taken_bytes
from tests.nfs.machines import LEASE_S, until

ROW_BYTES = 65_536
CAPACITY_BYTES = 16 << 20
SOAK_S = float(os.environ.get("KVTIER_NFS_SOAK_S", "30"))
KEYS = 2_000  # Several times what there is room for.


@pytest.mark.parametrize("naming", ["vllm", "flat"])
def test_each_host_reads_what_the_other_has_stored(guests, open_tier, on_server, naming):
    names = [open_tier(guest, ROW_BYTES, naming=naming, shared=True, capacity_bytes=CAPACITY_BYTES) for guest in guests]
    for place, (guest, name) in enumerate(zip(guests, names, strict=True)):
        assert guest.call("store", name, 100 * place, 40) == {"whole": 40}  # At once after the opening.
    for place, (guest, name) in enumerate(zip(reversed(guests), reversed(names), strict=True)):
        assert guest.call("probe", name, 100 * place, 60) == 40
        assert guest.call("load", name, 100 * place, 60) == {"whole": 40, "ChunkMissing": 20}
    used = [guest.call("page", name) for guest, name in zip(guests, names, strict=True)]
    assert used[0] == used[1]
    assert taken_bytes(on_server) <= sum(used[0])
    assert [guest.call("close", name) for guest, name in zip(guests, names, strict=True)] == [0, 0]


@pytest.mark.parametrize("options", [{"layout": "segments"}, {"naming": "flat"}], ids=str)
def test_a_directory_is_filled_to_its_capacity_and_goes_on_on_another_host(guests, open_tier, on_server, options):
    row_bytes, batch = 4 * ROW_BYTES, 16
    one, other = guests
    name = open_tier(one, row_bytes, capacity_bytes=CAPACITY_BYTES, **options)
    stored = 0
    while not one.call("counters", name)["evicted"]:
        assert one.call("store", name, stored, batch) == {"whole": batch}
        stored += batch
    assert CAPACITY_BYTES * 0.8 < taken_bytes(on_server) <= CAPACITY_BYTES
    assert one.call("close", name) == 0
    name = open_tier(other, row_bytes, capacity_bytes=CAPACITY_BYTES, **options)
    until(lambda: other.call("probe", name, stored - batch, batch) == batch)  # Its segments are looked through.
    assert other.call("load", name, stored - batch, batch) == {"whole": batch}
    assert other.call("close", name) == 0


@pytest.mark.parametrize("naming", ["vllm", "flat"])
def test_two_hosts_keep_one_capacity(guests, open_tier, on_server, naming):
    """`KVTIER_NFS_SOAK_S` says for how many seconds."""
    names = [open_tier(guest, ROW_BYTES, naming=naming, shared=True, capacity_bytes=CAPACITY_BYTES) for guest in guests]
    working = [guest.begin("work", name, SOAK_S, KEYS, guest.name) for guest, name in zip(guests, names, strict=True)]
    most, looks = 0, 0
    while not all(one.done() for one in working):
        most, looks = max(most, taken_bytes(on_server)), looks + 1
    done = [one.result() for one in working]
    print(f"\n{naming}: at most {most / CAPACITY_BYTES:.3f} of the capacity in {looks} looks", *done, sep="\n")
    assert most <= CAPACITY_BYTES
    for one in done:
        assert not {"load_wrong", "load_ChunkCorrupt", "load_away", "store_away", "delete_away"} & one.keys()
        assert one["store_whole"] > 0
        assert one["load_whole"] > 0
    for guest, name in zip(guests, names, strict=True):
        assert guest.call("counters", name)["evicted"]
        assert guest.call("close", name) == 0


def test_a_host_that_is_killed_with_the_pages_lock_holds_others_up_for_its_lease(
    guests, mount, folder, open_tier, on_server
):
    one, other = guests
    options = {"naming": "flat", "shared": True, "capacity_bytes": CAPACITY_BYTES}
    name = open_tier(one, ROW_BYTES, **options)
    killed, at = open_tier(other, ROW_BYTES, **options), mount(other)
    assert one.call("store", name, 0, 20) == {"whole": 20}
    assert other.call("store", killed, 100, 20) == {"whole": 20}
    working = other.begin("work", killed, 600, KEYS, "killed")
    (ledger,) = on_server.glob("*/ledger*")
    other.call("hold_page", at, f"{folder}/{ledger.relative_to(on_server)}")
    other.kill()
    begun = time.monotonic()
    storing = one.begin("store", name, 200, 20)
    assert one.call("load", name, 0, 20) == {"whole": 20}  # Who is killed holds up no load.
    assert storing.result(20 * LEASE_S) == {"whole": 20}
    print(f"\nheld up for {time.monotonic() - begun:.1f} s, with a lease of {LEASE_S} s")
    assert not working.done()
    other.boot()
    back = open_tier(other, ROW_BYTES, **options)
    assert other.call("load", back, 200, 20) == {"whole": 20}
    assert "wrong" not in other.call("load", back, 0, KEYS // 4)
    assert taken_bytes(on_server) <= CAPACITY_BYTES
    for guest, its in ((one, name), (other, back)):
        assert guest.call("close", its) == 0


def test_hosts_that_are_killed_at_any_moment_keep_the_capacity(guests, open_tier, on_server):
    one, other = guests
    options = {"naming": "flat", "shared": True, "capacity_bytes": CAPACITY_BYTES}
    name = open_tier(one, ROW_BYTES, **options)
    for rounds in range(2):
        other.begin("work", open_tier(other, ROW_BYTES, **options), 600, KEYS, f"killed {rounds}")
        working, killed = one.begin("work", name, SOAK_S / 3, KEYS, f"{rounds}"), False
        begun = time.monotonic()
        while not working.done():
            assert taken_bytes(on_server) <= CAPACITY_BYTES
            if not killed and time.monotonic() - begun > SOAK_S / 10:
                other.kill()
                killed = True
        assert "load_wrong" not in working.result()
        assert killed
        other.boot()
    assert one.call("close", name) == 0
