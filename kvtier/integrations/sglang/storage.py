"""KVTierStorage: the storage behind SGLang's HiCache. SGLang makes one in every scheduler process.

SGLang's host pools are the first tier already, so kvtier keeps no second copy: pages pass through staging rows. Each
host pool has its own engine, which opens when SGLang registers the pool: only then the page's size is known. A bad
configuration is refused there: the attach fails, and SGLang continues without storage.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import wraps
from itertools import takewhile
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from prometheus_client import CollectorRegistry, start_http_server
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolTransfer,
    PoolTransferResult,
)
from sglang.srt.observability.metrics_collector import StorageMetrics

from kvtier.errors import ConfigError, LineLimit, Remedy
from kvtier.integrations.sglang.engine import PoolEngine
from kvtier.integrations.sglang.options import durable_tiers, engine_config, read_options
from kvtier.integrations.sglang.pages import KV, HostPages, namespace_of, page_key, process_rank
from kvtier.integrations.sglang.signatures import SGLANG
from kvtier.integrations.signatures import warn_if_untried

CALLS_MAX = 1_024  # Calls kept for `get_stats`; the oldest are dropped.

P = ParamSpec("P")
R = TypeVar("R")

logger = logging.getLogger(__name__)
_failures = LineLimit(time.monotonic)


class _Pool(NamedTuple):
    pages: HostPages
    engine: PoolEngine


def _answers(otherwise: Callable[..., R]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a call so that it returns `otherwise` of its arguments instead of raising."""

    def wrap(call: Callable[P, R]) -> Callable[P, R]:
        name = call.__name__

        @wraps(call)
        def guarded(*given: P.args, **named: P.kwargs) -> R:
            try:
                return call(*given, **named)
            except Exception:  # The edge to SGLang: a bug of ours must not end its threads.
                if _failures.allows(name):
                    logger.exception("%s failed: it answers as if no page was there; see %s", name, Remedy.FAILED)
                return otherwise(*given, **named)

        return guarded

    return wrap


def _none(_: object, __: str, keys: Sequence[str], *___: object) -> list[bool]:
    return [False] * len(keys)


class KVTierStorage(HiCacheStorage):
    """Verified, bounded storage for HiCache and any thread. Once attached, calls end in time and never raise."""

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: object = None) -> None:
        """Check the options; nothing is opened until a pool is registered. Raises `ConfigError`."""
        warn_if_untried(SGLANG)
        self._config = storage_config
        self._options = read_options(storage_config.extra_config)
        self._pools: dict[str, _Pool] = {}
        self._loaded: deque[tuple[int, float]] = deque(maxlen=CALLS_MAX)  # Pages, and GB/s.
        self._stored: deque[tuple[int, float]] = deque(maxlen=CALLS_MAX)
        self._server: Any = None

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Open the engine of the KV pool. `ConfigError` and `BackendUnavailable` fail the attach."""
        super().register_mem_pool_host(mem_pool_host)
        self._open(mem_pool_host, KV)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: str) -> None:
        """Open the engine of a further pool. The KV pool, which SGLang registers twice, keeps its engine."""
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        self._open(host_pool, str(host_pool_name))

    def close(self) -> None:
        """Close all engines and end their runners, within `limits.close_s` each. Idempotent."""
        self._end_server()
        for pool in self._pools.values():
            pool.engine.close()

    @_answers(lambda *_, **__: 0)
    def batch_exists(self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:
        """Return the length of the leading run of keys that are stored."""
        return _leading(self._find(KV, keys, self._deadline()))

    @_answers(lambda *_, **__: False)
    def exists(self, key: str) -> bool:
        return self._find(KV, [key], self._deadline())[0]

    def batch_get_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Load pages into the pool; False for each one that is missing, damaged or late."""
        return self._load(KV, keys, host_indices, self._deadline())

    def batch_set_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Store pages of the pool; True for each one that a tier has when the call ends."""
        return self._store(KV, keys, host_indices, self._deadline())

    @_answers(lambda *_, **__: PoolTransferResult.empty())
    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        """Return the longest restorable prefix, all restorable prefixes, and each pool's own longest."""
        until = self._deadline()
        pages = _leading(self._find(KV, keys, until))
        hits = {KV: pages} if pages else {}
        restorable = list(range(1, pages + 1))
        for transfer in pool_transfers or []:
            if not restorable or transfer.hit_policy is PoolHitPolicy.BLOCK_GROUPS:  # Never bounds the KV pages.
                continue
            found = self._find(str(transfer.name), keys[:pages], until)
            window = pages if transfer.hit_policy is PoolHitPolicy.ALL_PAGES else max(1, len(transfer.keys or ()))
            if runs := _restorable(found, window):
                hits[transfer.name] = runs[-1]
            restorable = [length for length in restorable if length in set(runs)]
        return PoolTransferResult(restorable[-1] if restorable else 0, hits, restorable)

    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        until = self._deadline()
        return {each.name: self._load(str(each.name), each.keys or [], each.host_indices, until) for each in transfers}

    def batch_set_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        until = self._deadline()
        return {each.name: self._store(str(each.name), each.keys or [], each.host_indices, until) for each in transfers}

    # The interface before v1, which SGLang does not call with `interface_v1`.

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> torch.Tensor | None:
        return None

    def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None) -> list[Any]:
        return [None] * len(keys)

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        return False

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        return False

    @_answers(lambda *_, **__: False)
    def clear(self) -> bool:  # pyright: ignore[reportIncompatibleMethodOverride]  # As SGLang's own storages.
        """Delete every page on record: all pages of tiers that list them, and of others those used since the start."""
        until = self._deadline()
        cleared = [pool.engine.clear(until) for pool in self._pools.values()]
        return all(cleared)

    def get_stats(self) -> StorageMetrics | None:  # pyright: ignore[reportIncompatibleMethodOverride]  # As above.
        """Return pages and GB/s of the transfers since the last call; None if SGLang's metrics are disabled."""
        if not self._config.enable_storage_metrics:
            return None
        loaded, stored = _taken(self._loaded), _taken(self._stored)
        return StorageMetrics(
            prefetch_pgs=[pages for pages, _ in loaded],
            backup_pgs=[pages for pages, _ in stored],
            prefetch_bandwidth=[speed for _, speed in loaded],
            backup_bandwidth=[speed for _, speed in stored],
        )

    @property
    def metrics(self) -> dict[str, CollectorRegistry]:
        """The Prometheus registry of each pool's engine, by the pool's name."""
        return {name: pool.engine.metrics for name, pool in self._pools.items()}

    def _open(self, host_pool: Any, name: str) -> None:
        known = self._pools.get(name)
        if known is not None and known.pages.pool is host_pool:
            return
        options, pages = self._options, HostPages(host_pool)
        namespace = namespace_of(
            self._config, pages, name, revision=options.revision, kv_cache_dtype=options.kv_cache_dtype
        )
        config = engine_config(options, namespace, pages.page_bytes, side=name != KV)
        if known is not None:
            self._pools.pop(name).engine.close()
        self._pools[name] = _Pool(pages, PoolEngine(config, durable_tiers(options)))
        if name == KV and options.metrics_port is not None:
            self._serve(options.metrics_port + process_rank(self._config))

    def _serve(self, port: int) -> None:
        self._end_server()
        try:
            self._server = start_http_server(port, "127.0.0.1", self._pools[KV].engine.metrics)[0]
        except OSError as error:
            self.close()
            raise ConfigError(f"kvtier.metrics_port: {port} cannot be served ({error.strerror})") from error

    def _end_server(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            server.shutdown()
            server.server_close()

    def _deadline(self) -> float:
        return time.monotonic() + self._options.deadline_s

    def _find(self, name: str, keys: Sequence[str], until: float) -> list[bool]:
        return self._pools[name].engine.find([page_key(key) for key in keys], until)

    @_answers(_none)
    def _load(self, name: str, keys: Sequence[str], indices: torch.Tensor | None, until: float) -> list[bool]:
        pages, engine, indices = self._slots(name, keys, indices)
        begun, located = time.monotonic(), pages.to_load(indices)
        came = engine.load([page_key(key) for key in keys], located.pages, until)
        pages.settle(located, indices, came)
        self._measure(self._loaded, sum(came), pages.page_bytes, begun)
        return came

    @_answers(_none)
    def _store(self, name: str, keys: Sequence[str], indices: torch.Tensor | None, until: float) -> list[bool]:
        pages, engine, indices = self._slots(name, keys, indices)
        begun, located = time.monotonic(), pages.to_store(indices)
        stored = engine.store([page_key(key) for key in keys], located.pages, until)
        self._measure(self._stored, sum(stored), pages.page_bytes, begun)
        return stored

    def _slots(
        self, name: str, keys: Sequence[str], indices: torch.Tensor | None
    ) -> tuple[HostPages, PoolEngine, torch.Tensor]:
        """Return a pool and the slots of a call. ValueError if their number does not fit the keys."""
        if name not in self._pools:
            raise ValueError(f"pool {name}: not registered; {', '.join(self._pools)} are")
        pages, engine = self._pools[name]
        if indices is None or len(indices) != len(keys) * pages.page_size:
            given = 0 if indices is None else len(indices)
            raise ValueError(f"pool {name}: {given} slots given for {len(keys)} pages of {pages.page_size}")
        return pages, engine, indices

    def _measure(self, calls: deque[tuple[int, float]], pages: int, page_bytes: int, begun: float) -> None:
        if pages and self._config.enable_storage_metrics:
            calls.append((pages, pages * page_bytes / 1e9 / max(1e-9, time.monotonic() - begun)))


def _leading(found: Sequence[bool]) -> int:
    return sum(takewhile(bool, found))


def _restorable(found: Sequence[bool], window: int) -> list[int]:
    """Return the lengths of prefixes whose last `window` pages are all found."""
    lengths: list[int] = []
    run = 0
    for length, here in enumerate(found, 1):
        run = run + 1 if here else 0
        if run >= min(window, length):
            lengths.append(length)
    return lengths


def _taken(calls: deque[tuple[int, float]]) -> list[tuple[int, float]]:
    return [calls.popleft() for _ in range(len(calls))]
