"""Pages are found in every layout without a copy, allocated as described, and refused where only a copy could help."""

import re

import pytest
import torch

from kvtier.errors import ConfigError
from kvtier.kvcache.layout import (
    AttentionSpec,
    CacheAxes,
    KVCacheConfig,
    KVCacheGroup,
    MambaSpec,
    allocate_rows,
    allocate_tensors,
    cache_view,
    canonical_kv_caches,
    state_views,
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

BLOCKS = 5
BF16, FLOAT, BYTES = torch.bfloat16, torch.float32, {"dtype": torch.uint8}


def attention(heads=2, **fields):
    return AttentionSpec(**{"block_size": 4, "num_kv_heads": heads, "head_size": 8, "dtype": BF16} | fields)


def latent(size, **fields):
    return attention(1, head_size=size, head_size_v=0, **fields)


def states(*shapes, dtypes=(), **fields):
    return MambaSpec(block_size=4, shapes=shapes, dtypes=dtypes or (BF16,) * len(shapes), **fields)


ATTENTION, LATENT_SPEC = attention(), latent(12)
PAGE_BYTES = ATTENTION.page_bytes
STATE = states((2, 3), (7,), dtypes=(BF16, FLOAT))
PADDED_STATE = states((2, 3), (7,), dtypes=(BF16, FLOAT), padded_page_bytes=PAGE_BYTES)


def config_of(*groups, num_blocks=BLOCKS, kernel_block_size=None):
    made = (KVCacheGroup(layers=dict(group), kernel_block_size=kernel_block_size) for group in groups)
    return KVCacheConfig(num_blocks=num_blocks, groups=tuple(made))


@pytest.mark.parametrize(
    ("spec", "unpadded", "padded"),
    [
        (attention(), 256, 256),
        (attention(head_size_v=4), 192, 192),
        (attention(padded_page_bytes=300), 256, 300),
        (attention(align_bytes=200), 256, 400),
        (attention(dtype=torch.uint8, state_bytes=19), 152, 152),  # Values and their scales.
        (latent(12), 96, 96),
        (latent(512, **BYTES, block_size=256, state_bytes=584, tokens_per_state=128, align_bytes=576), 1_168, 1_728),
        (states((3, 10), (5,), dtypes=(BF16, FLOAT)), 80, 80),
    ],
)
def test_pages_are_as_long_as_their_heads_states_and_padding(spec, unpadded, padded):
    assert (spec.unpadded_page_bytes, spec.page_bytes) == (unpadded, padded)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: attention(block_size=0), "a block of 0 tokens"),
        (lambda: attention(align_bytes=0), "aligned to 0 bytes"),
        (lambda: attention(0), "0 heads of 8"),
        (lambda: attention(state_bytes=3), "3 bytes in torch.bfloat16"),
        (lambda: attention(tokens_per_state=3), "a block of 4 tokens has no whole states of 3"),
        (lambda: attention(padded_page_bytes=255), "a page of 256 bytes does not fit into 255 padded ones"),
        (lambda: states((1,), (2,), dtypes=(BF16,)), "2 state shapes and 1 dtypes"),
        (lambda: config_of({"a": ATTENTION, "b": attention(block_size=8)}), "one block size: {'a': 4, 'b': 8}"),
        (lambda: config_of({"a": ATTENTION}, kernel_block_size=3), "cannot be split into kernel blocks of 3"),
        (lambda: config_of({"a": ATTENTION}, num_blocks=0), "0 blocks of 1 layers"),
        (lambda: config_of({"a": ATTENTION}, {"a": ATTENTION}), "layers ['a', 'a'] in groups: each is needed once"),
        (lambda: CacheAxes("BNH"), "axes 'BNH' given"),
        (lambda: CacheAxes("BBNC"), "axes 'BBNC' given"),
        (lambda: CacheAxes("BXNC"), "axes 'BXNC' given"),
        (lambda: CacheAxes("BHNC", "BNC"), "lie in memory as 'BNC'"),
        (lambda: CacheAxes("BHNC", "BHCN"), "C, the content, is accepted as the innermost"),
    ],
)
def test_a_model_that_cannot_be_is_refused(make, message):
    with pytest.raises(ConfigError) as error:
        make()
    assert message in str(error.value)


def memory(size_bytes):
    return torch.arange(size_bytes).to(torch.int8)


def places(canonical, base):
    start = base.data_ptr()
    assert all(tensor.dtype == torch.int8 for tensor in canonical.tensors)
    return [(tensor.data_ptr() - start, tuple(tensor.shape), tensor.stride()) for tensor in canonical.tensors]


def page_bytes(canonical):
    return [[ref.page_bytes for ref in refs] for refs in canonical.groups]


def pages_in(cache, spec=ATTENTION, axes=None, num_blocks=BLOCKS):
    return canonical_kv_caches(config_of({"a": spec}, num_blocks=num_blocks), {"a": cache}, {"a": axes} if axes else {})


@pytest.mark.parametrize(
    ("axes", "parts"),
    [
        *((axes, 1) for axes in (KV_SPLIT_NHD, KV_SPLIT_HND, KV_JOINED_NHD, KV_JOINED_HND)),
        *((axes, 2) for axes in (KV_FRONT_NHD, KV_FRONT_HND, HEADS_FRONT)),
    ],
)
def test_a_cache_is_one_tensor_or_one_for_each_part_around_its_blocks(axes, parts):
    base, size = memory(PAGE_BYTES * BLOCKS), PAGE_BYTES // parts
    canonical = pages_in(cache_view(base, ATTENTION, axes, BLOCKS), axes=axes)
    assert places(canonical, base) == [(part * size * BLOCKS, (BLOCKS, size), (size, 1)) for part in range(parts)]
    assert canonical.groups == (tuple((part, size, ("a",), None) for part in range(parts)),)
    base = memory(PAGE_BYTES)  # One block alone is a page.
    alone = pages_in(cache_view(base, ATTENTION, axes, 1), axes=axes, num_blocks=1)
    assert places(alone, base) == [(0, (1, PAGE_BYTES), (PAGE_BYTES, 1))]


def test_parts_around_the_blocks_come_in_the_order_of_the_shape():
    quarter = PAGE_BYTES * BLOCKS // 4
    for axes, starts in ((CacheAxes("HKBNC"), [0, 1, 2, 3]), (CacheAxes("HKBNC", "KHBNC"), [0, 2, 1, 3])):
        base = memory(PAGE_BYTES * BLOCKS)
        canonical = pages_in(cache_view(base, ATTENTION, axes, BLOCKS), axes=axes)
        assert [start for start, _, _ in places(canonical, base)] == [quarter * part for part in starts]


def test_a_storage_that_ends_with_its_last_page_does_so_without_that_ones_padding():
    padded = attention(padded_page_bytes=PAGE_BYTES + 32)
    base = memory((PAGE_BYTES + 32) * BLOCKS - 32)
    cache = cache_view(base, padded, KV_JOINED_NHD, BLOCKS, block_stride_bytes=PAGE_BYTES + 32)
    assert places(pages_in(cache, padded, KV_JOINED_NHD), base) == [(0, (BLOCKS, PAGE_BYTES), (PAGE_BYTES + 32, 1))]


@pytest.mark.parametrize("num_blocks", [BLOCKS, 1])
def test_layers_over_the_same_bytes_share_a_tensor(num_blocks):
    other, base = attention(4, head_size=4), memory(PAGE_BYTES * num_blocks)
    caches = {
        "a": cache_view(base, ATTENTION, KV_JOINED_HND, num_blocks),
        "w": cache_view(base, other, KV_SPLIT_NHD, num_blocks),
        "s": state_views(base, PADDED_STATE, num_blocks),
    }
    config = config_of({"a": ATTENTION}, {"w": other}, {"s": PADDED_STATE}, num_blocks=num_blocks)
    canonical = canonical_kv_caches(config, caches, {"a": KV_JOINED_HND, "w": KV_SPLIT_NHD})
    assert places(canonical, base) == [(0, (num_blocks, PAGE_BYTES), (PAGE_BYTES, 1))]
    assert page_bytes(canonical) == [[PAGE_BYTES], [PAGE_BYTES], [40]]


def test_pages_in_rows_are_one_tensor_of_rows_and_one_reference_a_group():
    row_bytes = 2 * PAGE_BYTES + 96
    base = memory(64 + row_bytes * BLOCKS)
    rows = base[64:]
    caches = {
        "a": cache_view(rows, ATTENTION, KV_SPLIT_NHD, BLOCKS, block_stride_bytes=row_bytes),
        "b": cache_view(rows, ATTENTION, KV_JOINED_HND, BLOCKS, offset_bytes=PAGE_BYTES, block_stride_bytes=row_bytes),
        "l": cache_view(rows, LATENT_SPEC, LATENT, BLOCKS, block_stride_bytes=row_bytes),
    }
    axes = {"a": KV_SPLIT_NHD, "b": KV_JOINED_HND, "l": LATENT}
    canonical = canonical_kv_caches(config_of({"a": ATTENTION, "b": ATTENTION}, {"l": LATENT_SPEC}), caches, axes)
    assert places(canonical, base) == [(64, (BLOCKS, row_bytes), (row_bytes, 1))]
    assert canonical.groups == (((0, row_bytes, ("a", "b"), None),), ((0, row_bytes, ("l",), None),))


def test_a_row_begins_before_its_first_page_where_it_could_not_end_otherwise():
    row_bytes = 2 * PAGE_BYTES
    base = memory(row_bytes * BLOCKS)
    second = cache_view(base, ATTENTION, KV_JOINED_NHD, BLOCKS, offset_bytes=PAGE_BYTES, block_stride_bytes=row_bytes)
    assert places(pages_in(second, axes=KV_JOINED_NHD), base) == [(0, (BLOCKS, row_bytes), (row_bytes, 1))]


def test_heads_around_the_layers_of_a_row_lie_in_it_too():
    """vLLM's layout BHLNC: block, head, layer, token, content."""
    base = memory(2 * PAGE_BYTES * BLOCKS)
    five = base.view(BF16).view(BLOCKS, 2, 2, 4, 16)
    caches = {"a": five[:, :, 0], "b": five[:, :, 1]}
    config = config_of({"a": ATTENTION, "b": ATTENTION})
    canonical = canonical_kv_caches(config, caches, dict.fromkeys("ab", KV_JOINED_HND))
    assert places(canonical, base) == [(0, (BLOCKS, 2 * PAGE_BYTES), (2 * PAGE_BYTES, 1))]


def test_states_with_a_gap_between_them_are_one_page():
    halves = (base := memory(44 * BLOCKS)).view(BF16)
    apart = [halves.as_strided((BLOCKS, 6), (22, 1)), halves.as_strided((BLOCKS, 6), (22, 1), 16)]
    canonical = pages_in(apart, states((6,), (6,)))
    assert (places(canonical, base), page_bytes(canonical)) == ([(0, (BLOCKS, 44), (44, 1))], [[44]])


def strided(shape, strides, offset=0):
    return memory(4 * PAGE_BYTES * BLOCKS).view(BF16).as_strided(shape, strides, offset)


FAR = (BLOCKS - 1) * 64 + 8  # Values begin within the last block's keys.


def zeros(*shape, dtype=BF16):
    return torch.zeros(shape, dtype=dtype)


def parted(spec, axes, shape, strides, message):
    return spec, axes, strided(shape, strides), message


def behind(spec, found, caches, allocations=1):
    return spec, None, caches, f"states with strides {found} in {allocations} allocations do not share one page a block"


TWO = states((6,), (6,))
ONE_STATE = memory(1_000)
HALVES, BLOCKS_OF_12 = ONE_STATE.view(BF16), ONE_STATE[: 24 * BLOCKS].view(BF16)
IN_TWO_PAGES = [ONE_STATE[:60].view(BF16).view(BLOCKS, 2, 3), ONE_STATE[64:204].view(FLOAT).view(BLOCKS, 7)]
INNERMOST = "stride 1 of axis 0, its blocks, parts them into 128 pieces of 2 bytes (strides (1, 320, 80, 5))"
IN_ANOTHER = "a block reaches over 256 bytes, the next begins after 128 (stride 64 of axis 0, of (64, 64, 16, 1))"
INTO_VALUES = f"stride {FAR} of axis 0 lies within all blocks' 640 bytes (strides ({FAR}, 64, 16, 8, 1))"
JOIN, PART = (f": only a copy could {mend} them" for mend in ("join", "part"))
OTHER_BLOCKS = "shape (4, 2, 4, 16) and strides (128, 64, 16, 1) given, 5 blocks as axis 0 of BHNC accepted"
OTHER_PAGES = "1 x 128 bytes in a block (strides (64, 32, 8, 1)), 256 in its spec's page"
GAPS = "stride 2 of axis 3 leaves 2 bytes free inside of each block"
NARROW = attention(head_size=4, padded_page_bytes=256)
REFUSED = {
    "blocks innermost": parted(ATTENTION, KV_JOINED_HND, (BLOCKS, 2, 4, 16), (1, 320, 80, 5), INNERMOST + JOIN),
    "a block in another": parted(ATTENTION, KV_JOINED_HND, (BLOCKS, 2, 4, 16), (64, 64, 16, 1), IN_ANOTHER + PART),
    "keys in values": parted(ATTENTION, KV_FRONT_NHD, (2, BLOCKS, 4, 2, 8), (FAR, 64, 16, 8, 1), INTO_VALUES + PART),
    "elements overlap": parted(ATTENTION, KV_JOINED_HND, (BLOCKS, 2, 4, 16), (16, 0, 0, 1), "stride 0 of axis"),
    "gaps": parted(NARROW, KV_JOINED_HND, (BLOCKS, 2, 4, 8), (128, 64, 16, 2), GAPS),
    "no axes": (ATTENTION, None, zeros(BLOCKS, 2, 4, 16), "an attention layer without axes"),
    "other blocks": (ATTENTION, KV_JOINED_NHD, zeros(4, 2, 4, 16), OTHER_BLOCKS),
    "other axes": (ATTENTION, KV_JOINED_NHD, zeros(5, 2, 4), "shape (5, 2, 4) and strides"),
    "other pages": (ATTENTION, KV_JOINED_HND, zeros(5, 2, 4, 8), OTHER_PAGES),
    "no blocks first": (STATE, None, [zeros(3, 4)], "state of shape (3, 4) and strides (4, 1), not 5 blocks"),
    "states in two allocations": behind(
        STATE, [(6, 3, 1), (7, 1)], [zeros(BLOCKS, 2, 3), zeros(BLOCKS, 7, dtype=FLOAT)], allocations=2
    ),
    "states in two pages": behind(STATE, [(6, 3, 1), (7, 1)], IN_TWO_PAGES),
    "all blocks of the one, then all of the other": behind(  # At one distance in one allocation: no page has both.
        TWO, [(6, 1), (6, 1)], [part.view(BLOCKS, 6) for part in BLOCKS_OF_12.chunk(2)]
    ),
    "states at two distances": behind(
        TWO, [(32, 1), (16, 1)], [HALVES.as_strided((BLOCKS, 6), (step, 1), at) for step, at in ((32, 0), (16, 8))]
    ),
    "a state in two runs of blocks": behind(
        states((2, 6)), [(6, 30, 1)], [BLOCKS_OF_12.view(2, BLOCKS, 6).transpose(0, 1)]
    ),
}


@pytest.mark.parametrize(("spec", "axes", "cache", "message"), REFUSED.values(), ids=REFUSED)
def test_a_cache_that_is_not_its_specs_or_whose_pages_need_a_copy_is_refused(spec, axes, cache, message):
    with pytest.raises(ConfigError, match=f"^a: {re.escape(message)}"):
        pages_in(cache, spec, axes)


@pytest.mark.parametrize(
    ("offsets", "size_bytes", "last"),
    [
        ({"a": 0, "b": 2 * PAGE_BYTES}, 2 * PAGE_BYTES * (BLOCKS + 1), 3 * PAGE_BYTES),
        ({"a": 0}, 2 * PAGE_BYTES * BLOCKS - 32, PAGE_BYTES),  # The last row ends behind its memory.
    ],
)
def test_pages_that_no_row_holds_together_are_refused(offsets, size_bytes, last):
    row_bytes, base = 2 * PAGE_BYTES, memory(size_bytes)
    caches = {
        layer: cache_view(base, ATTENTION, KV_JOINED_NHD, BLOCKS, offset_bytes=offset, block_stride_bytes=row_bytes)
        for layer, offset in offsets.items()
    }
    config, axes = config_of(dict.fromkeys(caches, ATTENTION)), dict.fromkeys(caches, KV_JOINED_NHD)
    with pytest.raises(ConfigError) as error:
        canonical_kv_caches(config, caches, axes)
    assert str(error.value) == (
        f"{', '.join(caches)}: pages from byte 0 to {last} do not lie in one row of {row_bytes} bytes (their stride) "
        f"within {size_bytes:,} bytes of memory"
    )


def shapes_in(layers):
    return {
        layer: (view.storage_offset(), tuple(view.shape), view.stride())
        for layer, view in layers.items()
        if isinstance(view, torch.Tensor)
    }


def test_equal_pages_make_rows_of_pages_times_layers():
    config = config_of(dict.fromkeys("ab", ATTENTION), dict.fromkeys("wx", ATTENTION), num_blocks=3)
    made = allocate_rows(config, {"a": KV_JOINED_NHD, "b": KV_JOINED_HND, "w": KV_SPLIT_HND, "x": KV_JOINED_NHD})
    assert (made.rows.dtype, made.rows.shape) == (torch.int8, (3, 2 * 256))
    assert made.canonical.tensors == (made.rows,)
    assert made.canonical.groups == (((0, 512, ("a", "b"), None),), ((0, 512, ("w", "x"), None),))
    assert shapes_in(made.layers) == {
        "a": (0, (3, 2, 4, 16), (256, 16, 32, 1)),
        "b": (128, (3, 2, 4, 16), (256, 64, 16, 1)),
        "w": (0, (3, 2, 4, 2, 8), (256, 64, 8, 32, 1)),
        "x": (128, (3, 2, 4, 16), (256, 16, 32, 1)),
    }


def test_a_smaller_group_refers_to_its_part_of_the_rows_and_kernel_blocks_keep_one_distance():
    groups = (
        KVCacheGroup(layers=dict.fromkeys("ab", ATTENTION), kernel_block_size=2),
        KVCacheGroup(layers={"w": ATTENTION}, kernel_block_size=1),
    )
    made = allocate_rows(KVCacheConfig(num_blocks=3, groups=groups), dict.fromkeys("abw", KV_JOINED_HND))
    assert shapes_in(made.layers) == {
        "a": (0, (6, 2, 2, 16), (128, 32, 16, 1)),
        "b": (64, (6, 2, 2, 16), (128, 32, 16, 1)),
        "w": (0, (12, 2, 1, 16), (64, 16, 16, 1)),
    }
    assert page_bytes(made.canonical) == [[512], [3 * 128 + 64]]
    whole = config_of(dict.fromkeys("ab", ATTENTION), {"w": ATTENTION})
    assert page_bytes(allocate_rows(whole, dict.fromkeys("abw", KV_JOINED_HND)).canonical) == [[512], [256]]


@pytest.mark.parametrize(
    ("longest", "spec", "kernel_block_size", "row_bytes"),
    [
        (258, latent(4, dtype=FLOAT), None, 260),
        (260, latent(4, dtype=FLOAT), 2, 264),  # Each half has whole elements.
        (258, states((4,), (2,), dtypes=(BF16, FLOAT)), None, 260),
    ],
)
def test_rows_are_as_long_as_the_longest_group_and_whole_elements_of_all(longest, spec, kernel_block_size, row_bytes):
    groups = (
        KVCacheGroup(layers={"long": latent(longest, block_size=1, dtype=torch.uint8)}),
        KVCacheGroup(layers={"short": spec}, kernel_block_size=kernel_block_size),
    )
    made = allocate_rows(KVCacheConfig(num_blocks=3, groups=groups), dict.fromkeys(("long", "short"), LATENT))
    assert made.rows.shape == (3, row_bytes)


WIDE, PAIRS, ODD = attention(padded_page_bytes=512), attention(tokens_per_state=2), attention(state_bytes=6)


@pytest.mark.parametrize(
    ("allocate", "spec", "kernel_block_size", "axes", "message"),
    [
        (allocate_rows, ATTENTION, None, KV_FRONT_NHD, "blocks do not lead in memory (KBNHC)"),
        (allocate_rows, attention(padded_page_bytes=257), None, KV_JOINED_NHD, "pages of 257 bytes do not leave"),
        (allocate_rows, states((4,)), 2, LATENT, "a state cannot be split into 2 kernel blocks"),
        (allocate_tensors, WIDE, 2, KV_JOINED_NHD, "a padded page cannot be split into 2 kernel blocks"),
        (allocate_tensors, WIDE, None, KV_FRONT_NHD, "pages with axes K around blocks cannot be padded"),
        (allocate_tensors, ATTENTION, None, LATENT, "axes 'BNC' have no place for 2 heads"),
        (allocate_tensors, ATTENTION, None, None, "an attention layer without axes"),
        (allocate_tensors, PAIRS, 1, KV_JOINED_NHD, "2 states of a block cannot be split into 4"),
        (allocate_tensors, ODD, None, KV_FRONT_NHD, "content of 6 bytes cannot be split into keys"),
        (allocate_tensors, attention(padded_page_bytes=259), None, KV_JOINED_NHD, "blocks of 256 bytes cannot lie 259"),
    ],
)
def test_caches_that_no_backend_could_read_are_refused(allocate, spec, kernel_block_size, axes, message):
    with pytest.raises(ConfigError, match=f"^a: {re.escape(message)}"):
        allocate(config_of({"a": spec}, kernel_block_size=kernel_block_size), {"a": axes} if axes else {})


def test_layers_whose_pages_differ_share_no_tensor():
    with pytest.raises(ConfigError, match=r"pages of one length: \{'a': 256, 's': 40\} bytes"):
        allocate_tensors(config_of({"a": ATTENTION}, {"s": STATE}), {"a": KV_JOINED_NHD})


@pytest.mark.parametrize(
    ("view", "message"),
    [
        ({"block_stride_bytes": 254}, "blocks of 256 bytes cannot lie 254 bytes apart"),
        ({"offset_bytes": 1}, "a page at byte 1 of its memory cannot hold elements of torch.bfloat16"),
    ],
)
def test_pages_that_would_reach_into_each_other_or_split_elements_are_refused(view, message):
    with pytest.raises(ConfigError, match=message):
        cache_view(memory(4_096), ATTENTION, KV_JOINED_NHD, 3, **view)
    with pytest.raises(ConfigError, match=r"pages 18 bytes apart do not hold whole elements of torch\.float32"):
        state_views(memory(4_096), states((4,), dtypes=(FLOAT,)), 3, block_stride_bytes=18)
