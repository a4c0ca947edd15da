"""A file server that stops, is killed, or is out of reach, under engines and tiers of a host that mounts it."""

import signal
import threading

import pytest

from tests.nfs.machines import LEASE_S, SERVER, until

ROWS = 16
ROW_BYTES = 65_536
CAPACITY_BYTES = 16 << 20
MOUNTS = {"soft": "soft,timeo=10,retrans=1", "hard": "hard,timeo=10,retrans=1"}
SEGMENTS = {"layout": "segments"}
SHARED = {"naming": "flat", "shared": True, "capacity_bytes": CAPACITY_BYTES}
OWN = {"naming": "flat", "capacity_bytes": CAPACITY_BYTES}  # Without locks.
LIMITS = {"deadline_s": "3s", "breaker_failures": 2, "breaker_cooldown_s": "200ms", "answer_ttl_s": "10ms"}


@pytest.fixture
def open_engine(mount, folder):
    """Open an engine on a guest whose tier holds chunks 0 to 7 and whose primary holds none; return its name."""

    def open_engine(guest, mounted, runner, tier):
        tier = {**tier, "limits": LIMITS}
        guest.call(*("open_engine", "engine", mount(guest, MOUNTS[mounted]), folder, ROWS), runner=runner, tier=tier)
        assert guest.call("put", "engine", 0, 8) == 8
        until(lambda: guest.call("is_at_rest", "engine") and guest.call("reset", "engine"))
        until(lambda: guest.call("found", "engine", 0, 8) == 8)
        until(lambda: guest.call("reset", "engine"))
        return "engine"

    return open_engine


@pytest.mark.promise("NFS: the server hangs or is unreachable")
@pytest.mark.parametrize(
    ("mounted", "runner", "tier"),
    [("soft", "inline", SEGMENTS), ("soft", "process", SHARED), ("hard", "inline", SHARED), ("hard", "process", OWN)],
    ids=["soft-inline-segments", "soft-process-shared", "hard-inline-shared", "hard-process-own"],
)
def test_a_server_that_stops_costs_hits_and_they_come_back_with_it(guests, server, open_engine, mounted, runner, tier):
    """Its machine still answers for its connections, and so a client of version 4 waits for ever, with `soft`, too.

    An inline runner keeps its rows for as long. A runner's process is replaced; it ends at once if it has no locks
    there, and with it its rows come back. With locks it ends when the server has let go of them: the kernel waits for
    that.
    """
    guest = guests[0]
    engine = open_engine(guest, mounted, runner, tier)
    server.signal(signal.SIGSTOP)
    assert guest.call("found", engine, 0, 4) == 0
    assert guest.call("put", engine, 100, 4) == 4  # Nothing waits for the tier.
    if tier is OWN:
        until(lambda: not guest.call("state", engine)["quarantined"])
    else:
        assert guest.call("state", engine)["quarantined"]
    assert guest.call("found", engine, 4, 4) == 0
    server.signal(signal.SIGCONT)
    until(lambda: not guest.call("state", engine)["quarantined"])
    until(lambda: guest.call("found", engine, 0, 8) == 8)
    assert (guest.call("state", engine)["runners_lost"] > 0) is (runner == "process")
    assert guest.call("put", engine, 200, 4) == 4
    assert guest.call("is_at_rest", engine)
    assert guest.call("close_engine", engine) == 0


@pytest.mark.parametrize(
    ("mounted", "tier"), [("soft", SHARED), ("hard", SEGMENTS)], ids=["soft-shared", "hard-segments"]
)
def test_a_server_out_of_reach_keeps_rows_until_the_clients_time_out_if_there_is_one(
    guests, open_engine, mounted, tier
):
    guest = guests[0]
    engine = open_engine(guest, mounted, "inline", tier)
    guest.call("cut_off", SERVER, cut=True)
    try:
        assert guest.call("found", engine, 0, 4) == 0
        if mounted == "soft":
            until(lambda: not guest.call("state", engine)["quarantined"])
    finally:
        guest.call("cut_off", SERVER, cut=False)
    until(lambda: not guest.call("state", engine)["quarantined"])
    until(lambda: guest.call("found", engine, 0, 8) == 8)
    assert guest.call("close_engine", engine) == 0


def test_an_engine_is_closed_though_its_server_hangs(guests, server, open_engine):
    guest = guests[0]
    engine = open_engine(guest, "hard", "inline", SHARED)
    server.signal(signal.SIGSTOP)
    assert guest.call("found", engine, 0, 4) == 0
    assert guest.call("close_engine", engine, deadline_s=1.0) > 0


@pytest.mark.parametrize(
    ("mounted", "tier", "graceless"),
    [("soft", SHARED, False), ("soft", SHARED, True), ("hard", SEGMENTS, False)],
    ids=["soft-shared", "soft-shared, locks are lost", "hard-segments"],
)
def test_a_server_that_is_killed_costs_hits_and_they_come_back_with_the_next_one(
    guests, server, open_engine, mounted, tier, graceless
):
    guest = guests[0]
    engine = open_engine(guest, mounted, "inline", tier)
    server.kill()
    assert guest.call("found", engine, 0, 4) == 0
    if mounted == "soft":
        until(lambda: guest.call("found", engine, 0, 4) == 0 and guest.call("state", engine)["breaker"] != "CLOSED")
    server.start(graceless=graceless)
    until(lambda: guest.call("found", engine, 0, 8) == 8)
    until(lambda: not guest.call("state", engine)["quarantined"])

    def stored():
        guest.call("put", engine, 200, 4)
        return (
            guest.call("is_at_rest", engine)
            and guest.call("reset", engine)
            and guest.call("found", engine, 200, 4) == 4
        )

    until(stored)
    assert guest.call("state", engine)["breaker"] == "CLOSED"
    assert guest.call("close_engine", engine) == 0


@pytest.mark.promise("NFS: a host's locks are lost: it was cut off longer than its lease, or the server restarted")
def test_a_host_that_is_cut_off_for_longer_than_its_lease_goes_on_afterwards(guests, open_tier):
    one, other = guests
    how = {"options": MOUNTS["soft"]}
    names = [open_tier(guest, ROW_BYTES, how=how, **SHARED) for guest in guests]
    assert one.call("store", names[0], 0, 8) == {"whole": 8}
    one.call("cut_off", SERVER, cut=True)
    hanging = one.begin("store", names[0], 100, 8)
    assert hanging.exception(20 * LEASE_S) or set(hanging.result()) == {"TransferFailed"}
    threading.Event().wait(1.5 * LEASE_S)  # So long that the server may forget it.
    until(lambda: other.call("store", names[1], 200, 8) == {"whole": 8})
    one.call("cut_off", SERVER, cut=False)

    def stores():
        told = one.begin("store", names[0], 300, 8)
        return not told.exception(20 * LEASE_S) and told.result() == {"whole": 8}

    until(stores)
    assert one.call("load", names[0], 200, 8) == other.call("load", names[1], 300, 8) == {"whole": 8}
    assert [guest.call("close", name) for guest, name in zip(guests, names, strict=True)] == [0, 0]
