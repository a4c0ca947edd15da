"""The self-test's checks hold on the device and on a modelled one, and find copies that are wrong."""

from functools import partial

import numpy as np
import pytest

from kvtier.kvcache.transfer import Direction
from kvtier.kvcache.transfer.cuda import CudaCopier, Descriptors, batched, copiers_with
from kvtier.tools.selftest_checks import NotHere, Wrong, checks, come_back, families, transfers_wait
from tests.gpu.modelled import Modelled, batches


@pytest.mark.parametrize(("promise", "check"), checks(), ids=[promise for promise, _ in checks()])
def test_a_promise_is_kept(promise, check, each_device):
    try:
        assert check(each_device)
    except NotHere as reason:
        pytest.skip(str(reason))


def altered(change):
    def copy(copies, stream, stable):
        batches(change(copies) if len(copies.sizes) else copies, stream, stable)

    return lambda sides: copiers_with(sides, Modelled().place, copy)


class Impatient(CudaCopier):
    def mark(self):
        class Reached:
            def synchronize(self): ...

        return Reached()


class Hasty(CudaCopier):
    def begin(self, job):
        super().begin(job)
        return lambda: None


def copiers_of(kind, *, at_once=True):
    def copy(copies, stream, stable):
        batches(copies, stream, stable and at_once)

    def made(sides):
        return [kind(direction, Modelled().place, batched(sides, copy)) for direction in Direction]

    return made


BYTES = partial(come_back, families()[0])
FAULTS = {
    "the last byte stays behind": (altered(lambda copies: copies._replace(sizes=copies.sizes - 1)), BYTES),
    "a byte too many": (altered(lambda copies: copies._replace(sizes=copies.sizes + 1)), BYTES),
    "two pages change places": (altered(lambda copies: copies._replace(targets=np.roll(copies.targets, 1))), BYTES),
    "a page is forgotten": (altered(lambda copies: Descriptors(*(column[1:] for column in copies))), BYTES),
    "a store does not wait": (copiers_of(Impatient), partial(transfers_wait, Direction.STORE)),
    "a load does not wait": (copiers_of(Impatient), partial(transfers_wait, Direction.LOAD)),
    "a store ends early": (copiers_of(Hasty), partial(transfers_wait, Direction.STORE)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_copy_breaks_a_promise(fault, modelled):
    modelled.copiers, check = FAULTS[fault]
    with pytest.raises(Wrong, match="bytes are wrong, the first at") as _wrong:  # Its frames keep the memory.
        check(modelled)
    modelled.synchronize()  # Before the memory goes.


def test_a_check_of_order_proves_nothing_if_the_kernel_had_finished(modelled, monkeypatch):
    modelled.spin_s = 0.0
    launch_late = modelled.launch_late

    def launched(work):
        pending = launch_late(work)
        modelled.synchronize()
        return pending

    monkeypatch.setattr(modelled, "launch_late", launched)
    with pytest.raises(Wrong, match="had finished before the transfer was submitted: nothing was proved"):
        transfers_wait(Direction.STORE, modelled)
