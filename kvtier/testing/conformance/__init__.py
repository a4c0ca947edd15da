"""The promises of `kvtier.backend.contract`, as tests that any tier can be held to.

Subclass what your tier offers, in a module that pytest collects, and give it open, empty tiers:

    from kvtier.testing.conformance import BackendConformance, tier_context

    class TestMyTier(BackendConformance):
        @pytest_asyncio.fixture
        async def backend(self, tmp_path):
            context = tier_context(self.chunk_bytes)
            tier = await MyTier.open(MyOptions(root=str(tmp_path)), context)
            yield tier
            await tier.aclose(deadline_s=10)

- `BackendConformance`: every tier.
- `DurableBackendConformance`: tiers that keep chunks when they are closed. Fixture `reopen`: an async function without
  arguments that closes the open tier, if there is one, opens one over what it left, and returns it.
- `NamespacedConformance`: tiers that two models can share. Fixture `neighbour`: a tier over the storage of `backend`,
  opened with `tier_context(self.chunk_bytes, model_name="other")`.
- `InventoryConformance`, `MeasuredConformance`: tiers that offer `Inventory`, `Measured`.
- `BoundedConformance`: tiers that offer `Measured` and have a capacity. Fixture `small`: a tier with room for
  `room_chunks` chunks; `backend` is not needed.
- `AdvisedConformance`: tiers that heed hints, too. Fixture `small` as before.
- `CountedConformance`: tiers that offer `Counted`. Fixture `provoke`: an async function without arguments that makes
  `backend` count something.
- `DescribedConformance`: tiers that offer `Described`.
- `WrapperConformance`: tiers that stand around another one. Fixture `wrap`: a function that puts the wrapper around an
  open tier; `backend` is not needed.

Every test opens a new tier: fixtures have function scope. `chunk_bytes` (16,384) is the length of a row. `settle_s` is
how long a test waits for traces of a thread that should have ended. A class may override both.

For a tier's own tests, `Lender` lends rows and makes, stores, loads and names chunks (`keys_of`, `label`), and
`Follower` listens to a tier's report.

Needs pytest, pytest-asyncio (in either mode) and blockbuster: the extra `kvtier[test]`. It needs no network, no root,
and no fixture of kvtier's own. Chunks identify themselves in every 32 bytes, so a failed comparison names the
chunk of each byte.
"""

import pytest

# Before their import, or third parties see bare AssertionErrors.
MODULES = ("lender", "calling", "suite", "optional")
pytest.register_assert_rewrite(*(f"{__name__}.{module}" for module in MODULES))

from kvtier.testing.conformance.lender import Lender, key_of, keys_of, label, tier_context  # noqa: E402
from kvtier.testing.conformance.optional import (  # noqa: E402
    AdvisedConformance,
    BoundedConformance,
    CountedConformance,
    DescribedConformance,
    Follower,
    InventoryConformance,
    MeasuredConformance,
    WrapperConformance,
)
from kvtier.testing.conformance.suite import BackendConformance, DurableBackendConformance, NamespacedConformance  # noqa: E402

__all__ = [
    "AdvisedConformance",
    "BackendConformance",
    "BoundedConformance",
    "CountedConformance",
    "DescribedConformance",
    "DurableBackendConformance",
    "Follower",
    "InventoryConformance",
    "Lender",
    "MeasuredConformance",
    "NamespacedConformance",
    "WrapperConformance",
    "key_of",
    "keys_of",
    "label",
    "tier_context",
]
