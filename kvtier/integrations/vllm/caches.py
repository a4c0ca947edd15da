"""The KV caches that vLLM registers, as kvtier's transfers know them: the same tensors, its mappings translated."""

from vllm.v1.kv_offload.base import CanonicalKVCacheRef, CanonicalPageMapping
from vllm.v1.kv_offload.base import CanonicalKVCaches as VllmKVCaches

from kvtier.layout import CanonicalKVCaches, DataRef, PageMapping, Run


def canonical_caches(given: VllmKVCaches) -> CanonicalKVCaches:
    """Translate what vLLM's connector found; layers that lie over each other are moved once."""
    return CanonicalKVCaches(
        tuple(each.tensor for each in given.tensors),
        tuple(tuple(dict.fromkeys(map(_ref, refs))) for refs in given.group_data_refs),
    )


def _ref(ref: CanonicalKVCacheRef) -> DataRef:
    mapping = _own(ref.page_size_bytes) if ref.mapping is None else _mapping(ref.mapping)
    return DataRef(ref.tensor_idx, ref.page_size_bytes, (), mapping)


def _own(size_bytes: int) -> PageMapping:
    """Map a page that vLLM has not certified; it is never moved as a canonical one."""
    return PageMapping(
        canonical_bytes=size_bytes, local_bytes=size_bytes, runs=(Run(0, 0, size_bytes),), topology_free=False
    )


def _mapping(mapping: CanonicalPageMapping) -> PageMapping:
    return PageMapping(
        canonical_bytes=mapping.canonical_page_size_bytes,
        local_bytes=mapping.local_page_size_bytes,
        runs=tuple(
            Run(
                run.local_offset,
                run.canonical_offset,
                run.fragment_size,
                run.num_fragments,
                run.local_stride,
                run.canonical_stride,
            )
            for run in mapping.runs
        ),
        writers=mapping.num_writers,
        writer_index=mapping.writer_index,
        topology_free=mapping.parallelism_agnostic,
    )
