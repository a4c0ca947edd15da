"""The audit of an engine: every row has one owner, and every pin, lease and transfer a reason.

An auditor reads what is private: a public door to it would be there for nobody else. Each check is an assertion about
one moment between two calls, so `AuditedSteps` makes them whenever a step ends.
"""

import math
from collections import Counter
from collections.abc import Callable

from kvtier import StepManager, TieringOffloadingManager
from kvtier.engine.tier import WHEN_EVICTED
from kvtier.engine.traffic import Operation, Transfer
from tests.simulation.turns import check_turn


class AuditedSteps(StepManager):
    """An engine that audits itself at the end of every step."""

    audits = 0
    on_give_up: Callable[[list[Transfer]], None] = staticmethod(lambda transfers: None)
    """Called with what was under way when a reset waits no longer."""

    def end_step(self):
        super().end_step()
        check_turn()
        if not self._closed:
            self.audits += 1
            audit(self.ledger)

    def _reset(self):
        in_flight = list(self.ledger.traffic.in_flight.values())
        clean = super()._reset()
        if not clean:
            self.on_give_up(in_flight)
        return clean


class AuditedManager(TieringOffloadingManager):
    step_manager = AuditedSteps
    steps: AuditedSteps


def audit(ledger):
    """Raise AssertionError for whatever cannot be true of an engine between two calls."""
    _audit_rows(ledger)
    _audit_transfers(ledger)
    _audit_pins(ledger)
    _audit_ahead(ledger)
    for tier in ledger.tiers:
        _audit_tier(ledger, tier)


def audit_quiet(engine):
    """Raise AssertionError for whatever an engine keeps though nothing is under way and nobody uses it."""
    ledger = engine.steps.ledger
    audit(ledger)
    primary, transfers = ledger.primary, ledger.traffic
    assert not engine.steps._requests, f"requests never forgotten: {list(engine.steps._requests)}"
    assert not ledger.rows_in_use, f"{ledger.rows_in_use} rows in use by nobody"
    assert not any(primary._pins), f"pins left: {primary._pins}"
    assert not ledger.leases.rows, f"{ledger.leases.rows} rows leased to nobody"
    assert not primary.filling, f"filling for ever: {primary.filling}"
    assert not primary.quarantined, f"quarantined for ever: {primary.quarantined}"
    assert not transfers.in_flight, f"outcomes lost: {list(transfers.in_flight)}"
    assert not transfers.overdue, f"rows never returned: {list(transfers.overdue)}"
    assert primary.rows_free + len(primary.ready) == primary.rows, "rows leaked"


def _audit_rows(ledger):
    primary = ledger.primary
    owner = {}
    for state, rows in (
        ("free", primary._free),
        ("ready", primary.ready.values()),
        ("filling", primary.filling.values()),
        ("quarantined", primary.quarantined),
    ):
        for row in rows:
            assert row not in owner, f"row {row} is both {owner[row]} and {state}"
            owner[row] = state
    nobodys = primary.rows - len(owner) + len(primary.quarantined)
    assert primary.rows_quarantined == nobodys, f"{primary.rows_quarantined} rows said to be quarantined, not {nobodys}"
    keys = {row: key for named in (primary.ready, primary.filling) for key, row in named.items()}
    for row in range(primary.rows):
        assert primary.key(row) == keys.get(row), f"row {row} holds another key than it says"
        # What lost its key while it was pinned is nobody's, until its last pin goes.
        assert row in owner or primary.pinned(row), f"row {row} is leaked"
    retained = (
        [] if primary._hinted is None else [row for row in range(primary.rows) if row in primary._hinted.retained]
    )
    assert len(retained) == primary.retained <= primary._retained_max, f"rows {retained} are retained"
    assert all(primary.key(row) is not None for row in retained), (
        f"rows {retained} are retained, and not all hold chunks"
    )


def _audit_transfers(ledger):
    primary, transfers = ledger.primary, ledger.traffic
    borrowers = Counter()
    for transfer in transfers.overdue.values():
        if transfer.forgotten or transfer.operation is Operation.PROMOTION:
            borrowers.update(transfer.rows)
    assert borrowers == primary.quarantined, f"borrowed {dict(borrowers)}, quarantined {primary.quarantined}"
    writers = Counter()
    for transfer in transfers.in_flight.values():
        if transfer.operation is Operation.PROMOTION:
            writers.update(transfer.rows)
            assert [primary.filling.get(key) for key in transfer.keys] == list(transfer.rows), "a promotion lost a row"
        elif transfer.operation is Operation.CASCADE:
            assert [primary.ready.get(key) for key in transfer.keys] == list(transfer.rows), "a cascade lost a row"
    assert all(count == 1 for count in writers.values()), f"rows promoted into twice: {writers}"
    cascading = Counter()
    for transfer in _cascades(ledger):
        cascading.update(transfer.rows)
    for queued in ledger.traffic._cascades.values():
        cascading.update(primary.ready[key] for key in queued)
    assert cascading == transfers.cascade_rows, f"cascading {dict(cascading)}, noted {dict(transfers.cascade_rows)}"
    assert len(transfers.cascade_rows) <= ledger.traffic._cascade_rows_max, "cascades pin more than their share"


def _audit_pins(ledger):
    primary, leases = ledger.primary, ledger.leases
    assert leases.rows <= leases.rows_max, f"{leases.rows} rows leased, {leases.rows_max} may be"
    explained = ledger.traffic.cascade_rows + ledger.kept
    for row, holders in leases._holders.items():
        assert primary.key(row) is not None, f"row {row} is leased and holds nothing"
        assert all(row in request.leased for request in holders), f"row {row}: a lease that its holder does not know"
        explained[row] += len(holders)
    explained.update(primary.filling.values())
    for row, pins in enumerate(primary._pins):
        assert pins >= explained[row], f"row {row} has {pins} pins and {explained[row]} reasons"
    idle = sum(not primary._pins[row] for row in primary.ready.values())
    assert primary._idle == idle, f"{idle} rows are idle, {primary._idle} noted"
    loads = sum(primary._pins) - explained.total()
    used = loads + len(primary.filling) - len(ledger.loads.keys())
    assert used == ledger.rows_in_use, f"{used} rows are in use, {ledger.rows_in_use} noted"


def _audit_ahead(ledger):
    primary, ahead = ledger.primary, ledger.primary.ahead
    assert (ahead is not None) == ledger.writeback.active
    if ahead is None:
        return
    assert set(ahead) <= set(primary.ready.values()), "a row is chosen for eviction and is not ready"
    assert len(set(ahead)) == len(ahead), "a row is chosen twice"
    evicting = sum(tier.bit for tier in ledger.tiers if tier.spec.cascade == WHEN_EVICTED)
    for row in range(primary.rows):
        assert not ledger.writeback._dirty[row] & ~evicting, f"row {row} is dirty for a tier that wants nothing later"


def _audit_tier(ledger, tier):
    name = tier.spec.name
    loading = sum(len(transfer.keys) for transfer in _in_flight(ledger, Operation.PROMOTION) if transfer.tier is tier)
    assert loading == tier.loading, f"tier {name}: {loading} chunks loading, {tier.loading} noted"
    storing = [key for sent in _in_flight(ledger, Operation.CASCADE) if sent.tier is tier for key in sent.keys]
    storing += ledger.traffic._cascades.get(tier, ())
    assert len(storing) == len(set(storing)), f"tier {name}: a chunk is stored twice at once"
    assert set(storing) == tier.storing, f"tier {name}: {len(storing)} chunks storing, {len(tier.storing)} noted"
    assert tier.raced <= tier.storing, f"tier {name}: raced by what is not stored"
    assert len(storing) <= tier.spec.store_chunks_max, f"tier {name}: more chunks storing than may be"
    assert math.isfinite(tier.counters.declined_seconds), f"tier {name}: loads were declined that take for ever"
    asked = {key for sent in _in_flight(ledger, Operation.PROBE) if sent.tier is tier for key in sent.keys}
    assert tier.asking <= asked.union(tier.to_ask), f"tier {name}: waits for answers to questions that nobody asked"


def _in_flight(ledger, operation):
    return [transfer for transfer in ledger.traffic.in_flight.values() if transfer.operation is operation]


def _cascades(ledger):
    transfers = ledger.traffic
    for transfer in (*transfers.in_flight.values(), *transfers.overdue.values()):
        if transfer.operation is Operation.CASCADE and not transfer.forgotten:
            yield transfer
