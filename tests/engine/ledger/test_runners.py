"""A lost runner: its transfers are lost, its rows come back, and its outcomes are not its successor's."""

from kvtier.runner.messages import Code, Probe, Promote, RunnerBack, RunnerGone, RunnerLost, Scanned, unpack_keys
from tests.engine.ledger.bench import HIT, MISS, PENDING, RETRY


def lose(engine, epoch=0, *, back=False):
    engine.ledger.apply(RunnerLost(epoch, "killed by the test"))
    if back:
        engine.ledger.apply(RunnerBack(epoch + 1))


def test_transfers_of_a_lost_runner_are_lost_and_counted(engine):
    engine.holds("a")
    engine.store("b")
    engine.lookup("a", request := engine.request())
    engine.lookup("c")
    engine.step()
    lose(engine)
    assert not engine.ledger.pending
    assert engine.lookup("a", request) == [MISS]
    assert (engine.counters().failed, engine.counters().transfers_failed) == ({"lost": 3}, 0)
    assert engine.ledger.tiers[0].breaker.admits(engine.now)
    engine.ledger.apply(RunnerBack(1))
    assert engine.lookup("c") == [MISS]
    engine.step(seconds=10.0)
    assert engine.lookup("c") == [RETRY]


def test_a_successor_works_while_its_predecessor_still_holds_rows_which_are_no_fault_of_it(bench):
    engine = bench(rows=4)
    engine.store("ab")
    engine.step()
    lose(engine)
    assert engine.ledger.traffic.rows_overdue == 2
    engine.ledger.apply(RunnerBack(1))
    assert engine.ledger.traffic.rows_overdue == 0
    engine.store("c")
    (store,) = engine.step()
    engine.ledger.apply(RunnerGone(0))
    assert engine.ledger.pending
    engine.fail(store, Code.DEADLINE, lent=True)
    assert engine.ledger.traffic.rows_overdue == 1
    engine.give_back(store)
    assert engine.settled()


def test_after_a_loss_known_keys_stay_known_and_the_rest_is_probed(engine):
    engine.holds("a")
    engine.knows_all()
    assert engine.lookup("b") == [MISS]
    lose(engine, back=True)
    assert engine.lookup("ac") == [PENDING, RETRY]
    assert [type(action) for action in engine.step()] == [Probe, Promote]
    engine.ledger.apply(Scanned(0, complete=True))
    assert engine.lookup("d") == [MISS]


def test_while_there_is_no_runner_a_look_up_misses_at_once_and_stores_stay_in_the_primary(engine):
    engine.holds("a")
    lose(engine)
    assert engine.lookup("ab") == [MISS, MISS]
    engine.store("c")
    assert engine.step() == []
    assert engine.lookup("c") == [HIT]
    assert engine.counters().dropped == {"runner": 1}
    engine.ledger.apply(RunnerBack(1))
    assert engine.lookup("a") == [PENDING]


def test_a_new_runner_makes_the_lost_ones_deletions(bench):
    engine = bench(rows=4)
    engine.holds("ab")
    engine.ledger.delete(engine.keys("a"))
    engine.step()
    lose(engine)
    engine.ledger.delete(engine.keys("b"))
    engine.ledger.refuse(engine.step())
    engine.ledger.apply(RunnerBack(1))
    engine.holds("ab")
    (delete,) = engine.step()
    assert unpack_keys(delete.keys) == engine.keys("ab")
    engine.finish(delete)
    assert engine.settled()
    lose(engine, 1, back=True)
    assert engine.step() == []


def test_a_new_runner_does_not_delete_chunks_stored_again(bench):
    engine = bench(rows=4)
    engine.ledger.delete(engine.keys("ab"))
    engine.ledger.refuse(engine.step())  # The bridge's queue was full.
    engine.stored_in_tiers("a")
    engine.ledger.primary.discard(engine.keys("a")[0])  # Only the tier has it.
    lose(engine)
    engine.store("b")
    engine.step()
    engine.ledger.apply(RunnerBack(1))
    assert engine.step() == []
