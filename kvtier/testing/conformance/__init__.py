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

`BackendConformance` is for every tier, the others for what a tier offers. Each names the fixtures that it needs.
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
pytest.register_assert_rewrite(*(f"{__name__}.{module}" for module in ("lender", "calling", "suite", "optional")))

from kvtier.testing.conformance.lender import Lender as Lender
from kvtier.testing.conformance.lender import key_of as key_of
from kvtier.testing.conformance.lender import keys_of as keys_of
from kvtier.testing.conformance.lender import label as label
from kvtier.testing.conformance.lender import tier_context as tier_context
from kvtier.testing.conformance.optional import AdvisedConformance as AdvisedConformance
from kvtier.testing.conformance.optional import BoundedConformance as BoundedConformance
from kvtier.testing.conformance.optional import CountedConformance as CountedConformance
from kvtier.testing.conformance.optional import DescribedConformance as DescribedConformance
from kvtier.testing.conformance.optional import Follower as Follower
from kvtier.testing.conformance.optional import InventoryConformance as InventoryConformance
from kvtier.testing.conformance.optional import MeasuredConformance as MeasuredConformance
from kvtier.testing.conformance.optional import WrapperConformance as WrapperConformance
from kvtier.testing.conformance.suite import BackendConformance as BackendConformance
from kvtier.testing.conformance.suite import DurableBackendConformance as DurableBackendConformance
from kvtier.testing.conformance.suite import NamespacedConformance as NamespacedConformance
