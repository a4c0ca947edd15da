"""An engine without any I/O, and what its owner's thread does with it: what the step protocol is measured with.

The runner behind it answers at once that all was done, so that outcomes are applied, too.
"""

import random
from collections.abc import Callable, Sequence

from kvtier.bridge.base import Bridge
from kvtier.bridge.messages import Action, Cascade, Delete, Finished, Found, Promote, Scanned
from kvtier.bridge.packing import pack_keys
from kvtier.config import EngineConfig, EngineLimits, TierConfig, TierLimits
from kvtier.keys import OffloadKey, make_offload_key
from kvtier.region import Region
from kvtier.stepping import SteppedManager

ROWS = 65_536
KEYS_A_REQUEST = 32
REQUESTS_A_STEP = 64
CHUNK_BYTES = 4_096
REPORT_KEYS = 4_096  # As a tier reports what it holds.


class Echo(Bridge):
    """A runner that has done everything by the time it is asked."""

    def send(self, actions: Sequence[Action]) -> Sequence[Action]:
        done = [Finished(each.id, b"", b"", 0.0) for each in actions if isinstance(each, Promote | Cascade | Delete)]
        self.mailbox.extend(done)
        return ()

    def admit(self, epoch: int) -> None:
        raise AssertionError(epoch)

    def replace(self) -> bool:
        return False

    def close(self, deadline_s: float) -> int:  # noqa: ARG002  # Nothing is under way.
        return 0


class Steps:
    """An engine whose rows are never touched, and requests of 32 keys each."""

    def __init__(self, rows: int = ROWS, tiers: int = 0, *, seed: int = 7) -> None:
        limits = TierLimits(store_chunks_in_flight=rows, store_bytes_in_flight=rows * CHUNK_BYTES)
        config = EngineConfig(
            cpu_bytes_to_use=rows * CHUNK_BYTES,
            chunk_bytes=CHUNK_BYTES,
            secondary_tiers=tuple(TierConfig(type="dummy", limits=limits) for _ in range(tiers)),
            limits=EngineLimits(cascade_share=1.0),
        )
        self.rows = rows
        self.region = Region.private(rows, CHUNK_BYTES, prefault=False)
        self.bridge = Echo()
        self.manager = SteppedManager(config, self.region, self.bridge)
        self._random = random.Random(seed)
        self._requests = 0

    def hold(self, keys: int) -> None:
        """Have every tier hold so many keys that nobody will ask for, and say that it has no others."""
        for tier in range(len(self.manager.ledger.tiers)):
            for start in range(0, keys, REPORT_KEYS):
                named = [index.to_bytes(32, "big") for index in range(start, min(start + REPORT_KEYS, keys))]
                self.bridge.mailbox.append(Found(tier, pack_keys([make_offload_key(name) for name in named])))
                self.manager.end_step()
            self.bridge.mailbox.append(Scanned(tier, complete=True))
            self.manager.end_step()

    def new_keys(self, count: int | None = None) -> list[list[OffloadKey]]:
        """Return the keys of as many requests as fill the primary, or of so many keys."""
        return self.random_keys(count or self.rows, self._random)

    @staticmethod
    def random_keys(count: int, dice: random.Random) -> list[list[OffloadKey]]:
        """Return random keys in requests of 32."""
        keys = [make_offload_key(dice.randbytes(32)) for _ in range(count)]
        return [keys[start : start + KEYS_A_REQUEST] for start in range(0, count, KEYS_A_REQUEST)]

    def each(self, batches: list[list[OffloadKey]], call: Callable[[list[OffloadKey], str], None]) -> None:
        """Make a request and a step of each batch."""
        for keys in batches:
            request_id = self._begin()
            call(keys, request_id)
            self.manager.on_request_finished(request_id)
            self.manager.end_step()

    def look_up(self, keys: list[OffloadKey], request_id: str) -> None:
        for key in keys:
            self.manager.lookup(key, request_id)

    def store(self, keys: list[OffloadKey], request_id: str) -> None:
        plan = self.manager.prepare_store(keys, request_id)
        assert plan is not None
        self.manager.complete_store(plan.keys, request_id)

    def load(self, keys: list[OffloadKey], request_id: str) -> None:
        self.manager.touch(keys, request_id)
        self.manager.prepare_load(keys, request_id)
        self.manager.complete_load(keys, request_id)

    def step(self, batches: list[list[OffloadKey]]) -> None:
        """Make one step of all batches, each a request with new keys: looked up, prepared, completed, cascaded."""
        requests = [self._begin() for _ in batches]
        for keys, request_id in zip(batches, requests, strict=True):
            self.look_up(keys, request_id)
            self.store(keys, request_id)
        self.manager.end_step()
        for request_id in requests:
            self.manager.on_request_finished(request_id)

    def close(self) -> None:
        self.manager.shutdown()

    def _begin(self) -> str:
        self._requests += 1
        request_id = str(self._requests)
        self.manager.on_new_request(request_id)
        return request_id
