"""Canonical pages: which bytes of them each worker holds, down to the byte, and when nothing is known of them."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvtier.errors import ConfigError
from kvtier.kvcache.layout import (
    CacheAxes,
    FullAttentionSpec,
    LayerSpec,
    MambaSpec,
    MLASpec,
    PageMapping,
    PageRun,
    ParallelConfig,
    page_mapping,
)
from kvtier.kvcache.layout.axes import (
    HEADS_FRONT,
    KV_FRONT_HND,
    KV_FRONT_NHD,
    KV_JOINED_HND,
    KV_JOINED_NHD,
    KV_SPLIT_HND,
    KV_SPLIT_NHD,
    LATENT,
)
from kvtier.kvcache.layout.mapping import check_tiling, row_mapping

BF16 = torch.bfloat16
ORDERS = (KV_JOINED_NHD, KV_JOINED_HND, KV_SPLIT_NHD, KV_SPLIT_HND, KV_FRONT_NHD, KV_FRONT_HND)


def attention(heads: int, **fields: bool) -> FullAttentionSpec:
    return FullAttentionSpec(block_size=4, num_kv_heads=heads, head_size=8, dtype=BF16, **fields)


@pytest.mark.parametrize(
    ("axes", "runs"),
    [
        (KV_JOINED_NHD, (PageRun(0, 64, 64, 4, 64, 128),)),  # A token's two heads of four.
        (KV_JOINED_HND, (PageRun(0, 256, 256),)),  # Heads outermost: half of the page.
        (KV_SPLIT_NHD, (PageRun(0, 32, 32, 4, 32, 64), PageRun(128, 288, 32, 4, 32, 64))),  # Keys, then values.
        (KV_SPLIT_HND, (PageRun(0, 128, 128, 2, 128, 256),)),
        (KV_FRONT_NHD, (PageRun(0, 32, 32, 4, 32, 64),)),  # Of a page of keys, or of one of values.
        (KV_FRONT_HND, (PageRun(0, 128, 128),)),
    ],
)
def test_the_second_of_two_workers_has_the_second_half_of_the_heads(axes: CacheAxes, runs: tuple[PageRun, ...]) -> None:
    parts = 2 if axes.outside_blocks else 1
    assert page_mapping(attention(2), axes, ParallelConfig(tp_size=2, rank=1), 4) == PageMapping(
        canonical_bytes=512 // parts, local_bytes=256 // parts, runs=runs
    )


@given(
    heads=st.sampled_from([1, 2, 4, 8]),
    tp_size=st.sampled_from([1, 2, 4, 8]),
    axes=st.sampled_from(ORDERS),
    kernel_blocks=st.sampled_from([1, 2, 4]),
)
def test_the_parts_of_all_workers_tile_the_page(heads: int, tp_size: int, axes: CacheAxes, kernel_blocks: int) -> None:
    spec = attention(max(1, heads // tp_size))
    mappings = [
        page_mapping(spec, axes, ParallelConfig(tp_size=tp_size, rank=rank), heads, kernel_blocks)
        for rank in range(tp_size)
    ]
    for page in range(8):
        written = sorted(
            part
            for mapping in mappings
            if mapping.writes(page)
            for run in mapping.runs
            for part in run.fragments(canonical=True)
        )
        assert [start for start, _ in written] == [0, *(stop for _, stop in written[:-1])]
        assert written[-1][1] == mappings[0].canonical_bytes
    assert {mapping.topology_free for mapping in mappings} == {True}
    assert {mapping.writers for mapping in mappings} == {max(1, tp_size // heads)}


def test_a_worker_alone_has_the_page_in_one_piece() -> None:
    for axes in ORDERS:
        mapping = page_mapping(attention(4), axes, ParallelConfig(), 4)
        assert mapping.runs == (PageRun(0, 0, mapping.canonical_bytes),)


def test_workers_with_the_same_bytes_take_turns() -> None:
    latent = MLASpec(block_size=4, head_size=12, dtype=BF16)
    replicated = MambaSpec(block_size=4, shapes=((9,),), dtypes=(BF16,), replicated=True)
    for spec in (latent, replicated):
        for rank in range(3):
            mapping = page_mapping(spec, LATENT, ParallelConfig(tp_size=3, rank=rank), 1)
            size_bytes = spec.unpadded_page_bytes
            assert mapping == PageMapping(
                canonical_bytes=size_bytes,
                local_bytes=size_bytes,
                runs=(PageRun(0, 0, size_bytes),),
                writers=3,
                writer_index=rank,
            )
            assert [page for page in range(7) if mapping.writes(page)] == list(range(rank, 7, 3))


@pytest.mark.parametrize(
    ("spec", "axes", "parallel", "heads"),
    [
        (attention(2), None, ParallelConfig(tp_size=2), 4),
        (attention(2), KV_JOINED_NHD, ParallelConfig(tp_size=2), 0),
        (attention(2), KV_JOINED_NHD, ParallelConfig(tp_size=2), 8),
        (attention(2), KV_JOINED_NHD, ParallelConfig(tp_size=3), 6 + 1),
        (attention(1), LATENT, ParallelConfig(tp_size=2), 2),
        (attention(2), HEADS_FRONT, ParallelConfig(tp_size=2), 4),
        (attention(2, per_token_head_scales=True), KV_JOINED_NHD, ParallelConfig(tp_size=2), 4),
        (attention(2), KV_JOINED_NHD, ParallelConfig(tp_size=2, pp_size=2), 4),
        (attention(2), KV_JOINED_NHD, ParallelConfig(tp_size=2, pcp_size=2), 4),
        (attention(2), KV_JOINED_NHD, ParallelConfig(tp_size=2, dcp_size=2), 4),
        (MambaSpec(block_size=4, shapes=((8,),), dtypes=(BF16,)), None, ParallelConfig(tp_size=2), 4),
    ],
)
def test_where_nothing_is_known_each_worker_has_a_part_for_itself(
    spec: LayerSpec, axes: CacheAxes | None, parallel: ParallelConfig, heads: int
) -> None:
    parts = 2 if axes is HEADS_FRONT else 1
    page_bytes = spec.unpadded_page_bytes // parts
    assert page_mapping(spec, axes, parallel, heads) == PageMapping(
        canonical_bytes=page_bytes * parallel.world_size,
        local_bytes=page_bytes,
        runs=(PageRun(0, 0, page_bytes),),
        topology_free=False,
    )


@pytest.mark.parametrize(
    "mappings",
    [
        [((0, 0, 8),), ((0, 4, 8),)],  # Two write the same bytes.
        [((0, 0, 8),), ((0, 12, 8),)],  # Nobody writes some.
        [((0, 0, 8),), ((0, 8, 4),)],  # The end is missing.
        [((0, 0, 8),), ((4, 8, 8),)],  # A page's begin is not stored.
    ],
)
def test_parts_that_do_not_tile_a_page_are_refused(mappings: list[tuple[tuple[int, int, int], ...]]) -> None:
    with pytest.raises(ConfigError, match="fragments of a page"):
        check_tiling(
            tuple(
                PageMapping(canonical_bytes=16, local_bytes=8, runs=tuple(PageRun(*run) for run in runs))
                for runs in mappings
            )
        )


def test_mappings_are_checked_before_anything_is_copied_by_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def over_each_other(size_bytes: int, rank: int, ranks: int) -> PageMapping:
        return PageMapping(
            canonical_bytes=size_bytes * ranks, local_bytes=size_bytes, runs=(PageRun(0, 0, size_bytes),)
        )

    monkeypatch.setattr("kvtier.kvcache.layout.mapping._own_part", over_each_other)
    state = MambaSpec(block_size=4, shapes=((77,),), dtypes=(BF16,))
    with pytest.raises(ConfigError, match="fragments of a page of 308 bytes end at 154 and begin at 0"):
        page_mapping(state, None, ParallelConfig(tp_size=2), 0)


def test_a_row_is_the_same_in_every_worker_if_all_its_pages_are() -> None:
    latent = MLASpec(block_size=4, head_size=12, dtype=BF16)
    parallel = ParallelConfig(tp_size=2)
    assert row_mapping([latent, latent], 192, parallel).topology_free
    assert not row_mapping([latent, attention(2)], 352, parallel).topology_free


def test_workers_that_disagree_are_refused() -> None:
    one = PageMapping(canonical_bytes=8, local_bytes=8, runs=(PageRun(0, 0, 8),))
    other = PageMapping(canonical_bytes=16, local_bytes=8, runs=(PageRun(0, 8, 8),))
    with pytest.raises(ConfigError, match="disagree"):
        check_tiling((one, other))
