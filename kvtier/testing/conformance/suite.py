"""All promises that every tier makes, as one class."""

from kvtier.testing.conformance.calling import Cancellation, Concurrency, GoodManners, TheEnd
from kvtier.testing.conformance.moving import Batches, Deleting, WhatGoesInComesOut


class BackendConformance(WhatGoesInComesOut, Batches, Deleting, Concurrency, Cancellation, GoodManners, TheEnd):
    """What every tier promises. Needs the fixture `backend`: an open tier with nothing in it."""
