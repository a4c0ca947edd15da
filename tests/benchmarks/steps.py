"""What the step protocol is measured with: 64 requests a step, 32 keys a request, LRU, 65,536 rows, and no I/O."""

import random
from collections.abc import Callable, Sequence

from kvtier.bridge.base import Bridge
from kvtier.bridge.messages import Action
from kvtier.config import EngineConfig
from kvtier.keys import OffloadKey, make_offload_key
from kvtier.region import Region
from kvtier.stepping import SteppedManager

ROWS = 65_536
REQUESTS_A_STEP = 64
KEYS_A_REQUEST = 32
CHUNK_BYTES = 4_096


class NoRunner(Bridge):
    """Takes everything, says nothing: what is measured is the owner's thread alone."""

    def send(self, actions: Sequence[Action]) -> Sequence[Action]:
        return ()

    def admit(self, epoch: int) -> None:
        raise AssertionError(epoch)

    def replace(self) -> bool:
        return False

    def close(self, deadline_s: float) -> int:
        return 0


class Steps:
    """Requests of 32 keys each, over and over, each set of keys new or old."""

    def __init__(self) -> None:
        config = EngineConfig(cpu_bytes_to_use=ROWS * CHUNK_BYTES, chunk_bytes=CHUNK_BYTES)
        self.manager = SteppedManager(config, Region.private(ROWS, CHUNK_BYTES, prefault=False), NoRunner())
        self.random = random.Random(7)
        self.requests = 0

    def new_keys(self) -> list[list[OffloadKey]]:
        hashes = [self.random.randbytes(32) for _ in range(ROWS)]
        keys = [make_offload_key(chunk_hash) for chunk_hash in hashes]
        return [keys[start : start + KEYS_A_REQUEST] for start in range(0, ROWS, KEYS_A_REQUEST)]

    def each(self, batches: list[list[OffloadKey]], call: Callable[[list[OffloadKey], str], None]) -> None:
        for keys in batches:
            self.requests += 1
            request_id = str(self.requests)
            self.manager.on_new_request(request_id)
            call(keys, request_id)
            self.manager.on_request_finished(request_id)
            if self.requests % REQUESTS_A_STEP == 0:
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
