"""The vLLM that is installed, compared with what kvtier uses of it.

vLLM's offloading interface changes with its releases, and a call that differs would fail in a step. kvtier's own
classes say which methods vLLM calls, and with which parameters; the tables say what kvtier gives and reads.
"""

import inspect
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache
from importlib import import_module
from inspect import Parameter
from operator import attrgetter

from vllm import __version__

from kvtier.errors import ConfigError, Remedy

TRIED_VERSIONS = ("0.32", "0.33")
NEWER = frozenset({"config_info", "config_info_keys", "on_reset_flushed"})  # Methods that the oldest of these lacks.

_BASE, _TIERING = "v1.kv_offload.base", "v1.kv_offload.tiering.base"
_CONNECTOR = "distributed.kv_transfer.kv_connector.v1"
_STATS = f"{_CONNECTOR}.offloading.metrics:OffloadingConnectorStats"

GIVEN = {  # Parameters that kvtier gives, in their order; vLLM may have others with defaults.
    f"{_CONNECTOR}.offloading_connector:OffloadingConnector": "vllm_config role kv_cache_config",
    f"{_CONNECTOR}.offloading.canonical_mapping:canonical_format_id": "kv_cache_layout",
    f"{_STATS}.increase_counter": "self counter_name counter_increase_value labelvalues",
    f"{_STATS}.set_gauge": "self gauge_name gauge_value labelvalues",
    f"{_STATS}.observe_histogram": "self histogram_name histogram_value labelvalues",
    f"{_STATS}.is_empty": "self",
    f"{_BASE}:OffloadingSpec": "config",
    f"{_BASE}:PrepareStoreOutput": "keys_to_store store_spec evicted_keys",
    f"{_BASE}:OffloadingEvent": "keys medium removed locality ownership removal_expected",
    f"{_BASE}:TransferResult": "job_id success transfer_size transfer_time",
    f"{_BASE}:ReqContext.get_offload_key_position": "self key",
    f"{_BASE}:OffloadingCounterMetadata": "documentation labelnames",
    f"{_BASE}:OffloadingGaugeMetadata": "documentation labelnames",
    f"{_BASE}:OffloadingHistogramMetadata": "documentation labelnames buckets",
    f"{_TIERING}:SecondaryTierManager": "offloading_spec primary_kv_view tier_type backpressure_detector",
    f"{_TIERING}:JobResult": "job_id success successful_keys transfer_time transfer_bytes",
    "v1.kv_offload.cpu.common:CPULoadStoreSpec": "block_ids",
}

READ = {  # Fields that kvtier reads.
    f"{_BASE}:ReqContext": "req_id kv_transfer_params load_tier_filter",
    f"{_BASE}:TierFilter": "matchers",
    f"{_BASE}:CanonicalKVCaches": "tensors group_data_refs",
    f"{_BASE}:GPULoadStoreSpec": "block_ids group_sizes block_indices",
    f"{_BASE}:BlockIDsLoadStoreSpec": "block_ids",
    f"{_TIERING}:TransferJob": "job_id keys chunk_ids req_context",
    "v1.kv_offload.config:OffloadingConfig": "groups worker_kv_bytes_per_block extra_config engine_id model cache"
    " parallel replicated_layout canonical_layout kv_cache_layout",
    "v1.core.sched.output:SchedulerOutput": "num_scheduled_tokens total_num_scheduled_tokens"
    " scheduled_spec_decode_tokens scheduled_encoder_inputs has_sync_kv_loads",
}


def refusal(difference: object) -> ConfigError:
    return ConfigError(
        f"kvtier does not fit vLLM {__version__}: {difference}; install vLLM {' or '.join(TRIED_VERSIONS)}, or a"
        " kvtier that knows this one"
    )


@cache
def warn_if_untried() -> None:
    """Log one warning in this process for a version that fits and was never tried."""
    if ".".join(__version__.split(".")[:2]) not in TRIED_VERSIONS:
        logging.getLogger(__name__).warning(
            "vLLM %s has the names and signatures that kvtier uses, but kvtier was tried with %s alone; see %s",
            __version__,
            " and ".join(TRIED_VERSIONS),
            Remedy.CONFIGURATION,
        )


def differences(ours: Sequence[type]) -> Iterator[str]:
    """Yield the names of vLLM's that differ from what these classes override, and from the tables."""
    for each in ours:
        base = next(above for above in each.__mro__ if above.__module__.startswith("vllm."))
        yield from (f"{base.__name__}.{name} is new" for name in sorted(getattr(each, "__abstractmethods__", ())))
        for name in [name for name in vars(each) if not name.startswith("_") and callable(getattr(each, name))]:
            theirs, mine = getattr(base, name, None), _parameters(getattr(each, name))
            known = [one for one in mine if mine[one].kind is Parameter.POSITIONAL_OR_KEYWORD]
            if theirs is not None:
                has = _parameters(theirs)
                needed = _without_default(mine) & {*known}
                bound = has.keys() if len(known) == len(mine) else ()  # With `*given`, any further ones.
                yield from _compared(f"{base.__name__}.{name}", has, known, needed, bound)
            elif name not in NEWER:
                yield f"{base.__name__}.{name} is missing"
    for place, names in [*GIVEN.items(), *READ.items()]:
        module, _, path = place.partition(":")
        try:
            has = _parameters(attrgetter(path)(import_module(f"vllm.{module}")))
        except (ImportError, AttributeError):
            yield f"{path} is missing"
            continue
        known = names.split()
        if place in GIVEN:
            yield from _compared(path, has, known, known, _without_default(has))
        else:
            yield from _compared(path, has, (), known, ())


def _parameters(of: Callable[..., object]) -> Mapping[str, Parameter]:
    return inspect.signature(of).parameters


def _without_default(parameters: Mapping[str, Parameter]) -> set[str]:
    return {name for name, each in parameters.items() if each.default is Parameter.empty}


def _compared(
    name: str, has: Mapping[str, Parameter], order: Collection[str], needed: Iterable[str], bound: Iterable[str]
) -> Iterator[str]:
    """Yield vLLM's parameters if any `needed` is missing, any `bound` is not in `order`, or the order differs."""
    same = [each for each in has if each in order] == [each for each in order if each in has]
    if not (same and set(has).issuperset(needed) and set(order).issuperset(bound)):
        yield f"{name}({', '.join(has)}) differs from the known ({', '.join(order or needed)})"
