"""Pages that differ in anything that decides their bytes never share a name."""

import pytest
import torch

from kvtier.backend import FileMapper
from kvtier.errors import ConfigError
from kvtier.integrations.sglang.pages import HostPages, namespace_of, page_key
from tests.sglang.doors import LAYOUTS, mha_pool, mla_pool, storage_config


def folder(pool, name="kv", revision=None, kv_cache_dtype=None, **changed):
    options = {"revision": revision, "kv_cache_dtype": kv_cache_dtype}
    return FileMapper(namespace_of(storage_config(**changed), HostPages(pool), name, **options)).chunks_folder


def test_two_pools_that_differ_have_different_folders():
    mha, fp8 = mha_pool(2), mha_pool(2, dtype=torch.float8_e4m3fn)
    ranks = [{"tp_size": 2}, {"tp_size": 2, "tp_rank": 1}, {"pp_size": 2, "pp_rank": 1}]
    ranks.append({"attn_cp_size": 2, "attn_cp_rank": 1})
    folders = [
        *(folder(mha_pool(2, layout)) for layout in LAYOUTS),
        *(folder(mha, **rank) for rank in ranks),
        *(folder(mla_pool(2, layout), is_mla_model=True) for layout in ("page_first", "layer_first")),
        *(folder(fp8, kv_cache_dtype=dtype) for dtype in ("fp8_e4m3", "fp8_e5m2")),
        folder(mha_pool(2, dtype=torch.float16)),
        folder(mha, model_name="org/other"),
        folder(mha, revision="abc"),
        folder(mha, name="draft"),
    ]
    assert sorted(set(folders)) == sorted(folders)


@pytest.mark.parametrize(
    ("make", "name", "count"), [(mla_pool, "kv", 1), (mha_pool, "mamba", 4), (mha_pool, "draft", 4)]
)
def test_the_ranks_of_an_mla_model_share_its_latent_pages_and_no_pool_that_is_divided(make, name, count):
    pool = make(2)
    assert len({folder(pool, name, is_mla_model=True, tp_size=4, tp_rank=rank) for rank in range(4)}) == count


@pytest.mark.parametrize(
    ("dtype", "changed", "message"),
    [  # SGLang's pool does not tell e4m3 from e5m2.
        (torch.float8_e5m2, {}, r"kvtier\.kv_cache_dtype: missing.*fp8_e4m3 or fp8_e5m2"),
        (torch.bfloat16, {"model_name": None}, "model_name"),
    ],
)
def test_a_model_without_a_name_and_fp8_without_its_own_are_refused(dtype, changed, message):
    with pytest.raises(ConfigError, match=message):
        folder(mha_pool(2, dtype=dtype), **changed)


def test_a_key_is_sglangs_hash_and_other_texts_never_meet_it():
    digest = "ab" * 32
    assert page_key(digest)[:-4] == bytes.fromhex(digest)
    assert len({page_key(text) for text in (digest, digest.upper(), digest[:-1], "", "x")}) == 5
