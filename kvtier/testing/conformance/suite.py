"""All promises that every tier makes, as one class."""

from kvtier.testing.conformance.batches import Batches
from kvtier.testing.conformance.cancellation import Cancellation
from kvtier.testing.conformance.concurrency import Concurrency
from kvtier.testing.conformance.deleting import Deleting
from kvtier.testing.conformance.ending import TheEnd
from kvtier.testing.conformance.manners import GoodManners
from kvtier.testing.conformance.roundtrip import WhatGoesInComesOut


class BackendConformance(WhatGoesInComesOut, Batches, Deleting, Concurrency, Cancellation, GoodManners, TheEnd):
    """What every tier promises. Needs the fixture `backend`: an open tier with nothing in it."""
