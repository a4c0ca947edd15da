import hashlib
import itertools
import json
import os.path
import struct

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.backend import namespace as names
from kvtier.backend.namespace import NAMINGS, FileMapper, Group, Namespace, OffloadKey, make_offload_key, read_folder
from kvtier.errors import ConfigError
from kvtier.settings import decode

ASCENDING = make_offload_key(bytes(range(32)), 0)
ONES = make_offload_key(b"\xff" * 32, 7)


def layers(count):
    return tuple(f"model.layers.{index}.self_attn.attn" for index in range(count))


LLAMA = Namespace(
    model_name="meta-llama/Llama-3.1-8B-Instruct", tp_size=2, rank=1, kv_cache_groups=(Group(layer_names=layers(3)),)
)
QWEN = Namespace(  # Every fact that lets tensor-parallel sizes share, without the engine's word for it.
    model_name="Qwen/Qwen2.5-7B",
    tp_size=4,
    rank=3,
    kv_cache_groups=(Group(layer_names=layers(2), attention="full_attention"),),
    parallel_agnostic=True,
    kv_heads_per_rank=2,
    total_kv_heads=8,
    per_token_head_scales=False,
    v2_model_runner=False,
    layout="BHLNC",
    row_bytes=4_096,
)
DEEPSEEK = Namespace(
    model_name="deepseek-ai/DeepSeek-V2-Lite",
    tp_size=2,
    dtype="fp8_e4m3",
    blocks_per_chunk=4,
    kv_cache_groups=(Group(tokens_per_block=64, layer_names=layers(1), attention="mla"),),
    parallel_agnostic=True,
    replicated_layout=True,
)
GEMMA = Namespace(
    model_name="google/gemma-3-27b-it",
    tp_size=2,
    tokens_per_hash=32,
    kv_cache_groups=(
        Group(tokens_per_block=32, layer_names=layers(2), attention="full_attention"),
        Group(tokens_per_block=32, layer_names=layers(3)[2:], attention="sliding_window"),
    ),
    parallel_agnostic=True,
    canonical_format="v1-hnd",
    is_parallelism_agnostic=True,
)
SPREAD_OUT = Namespace(
    model_name="google/gemma-3-27b-it",
    rank=7,
    parallel_agnostic=True,
    canonical_format="v1-nhd",
    **dict.fromkeys(("tp_size", "pp_size", "pcp_size", "dcp_size"), 2),
)
ODD = Namespace(
    model_name='модель/名前 "x"\n\\', kv_cache_groups=(Group(layer_names=("слой.0",)),), inference_engine="kvtier"
)

# What the FileMapper of vLLM 0.32.0 answers for the same fields.
VLLM_FOLDERS = [
    (Namespace(model_name="default"), "default_e58d9229ebb8", 0),
    (LLAMA, "meta-llama_Llama-3.1-8B-Instruct_033c66e1c547", 1),
    (QWEN, "Qwen_Qwen2.5-7B_0383cc48d446", 0),
    (DEEPSEEK, "deepseek-ai_DeepSeek-V2-Lite_32a0a33acc3f", 0),
    (GEMMA, "google_gemma-3-27b-it_e53d1acfa369", 0),
    (SPREAD_OUT, "google_gemma-3-27b-it_78301c46d8c8", 7),
    (Namespace(model_name="../../etc/passwd"), ".._.._etc_passwd_183604a3fafe", 0),
    (Namespace(model_name=".."), ".._938f251413a2", 0),
    (ODD, 'модель_名前 "x"\n\\_622912f16c20', 0),
]

VLLM_LLAMA_CONFIG_SHA256 = "7f1629890308df5a2e1076ce4504a22bffe44434dbebf4f8741ec5f7212512ea"


@pytest.mark.parametrize(("namespace", "folder", "rank"), VLLM_FOLDERS)
def test_names_are_those_of_vllm(namespace, folder, rank):
    mapper = FileMapper(namespace)
    assert (mapper.folder, mapper.config_name) == (folder, f"{folder}/config.json")
    digits = "000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f"
    assert mapper.name(ASCENDING) == f"{folder}_r{rank}/000/10_g0/{digits}.bin"
    assert mapper.name(ONES) == f"{folder}_r{rank}/fff/ff_g7/{'f' * 64}.bin"


@pytest.mark.parametrize(
    ("digest", "group", "vllm", "flat"),
    [
        (b"", 2**32 - 1, "//_g4294967295/.bin", "/00/_g4294967295.bin"),
        (b"\xa0", 0, "/a0/_g0/a0.bin", "/a0/a0_g0.bin"),
        (b"\xab\xcd", 1, "/abc/d_g1/abcd.bin", "/ab/abcd_g1.bin"),
    ],
)
def test_short_hashes_have_names_too(digest, group, vllm, flat):
    namespace, key = Namespace(model_name="default"), make_offload_key(digest, group)
    assert FileMapper(namespace).name(key) == f"default_e58d9229ebb8_r0{vllm}"
    assert FileMapper(namespace, "flat").name(key) == f"default_e58d9229ebb8_r0_flat{flat}"


def test_the_configuration_beside_the_chunks_is_the_text_that_vllm_writes():
    assert hashlib.sha256(FileMapper(LLAMA).config_bytes).hexdigest() == VLLM_LLAMA_CONFIG_SHA256


def test_another_naming_changes_the_folder_alone():
    flat, vllms = FileMapper(LLAMA, "flat"), FileMapper(LLAMA)
    assert (flat.chunks_folder, flat.folder) == (f"{vllms.chunks_folder}_flat", vllms.folder)
    assert (flat.config_bytes, flat.fingerprint) == (vllms.config_bytes, vllms.fingerprint)


SIZES = st.integers(1, 64)
NAMES = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=40)
GROUPS = st.builds(
    Group,
    tokens_per_block=st.integers(1, 4096),
    layer_names=st.lists(NAMES, max_size=3).map(tuple),
    attention=st.sampled_from([None, "full_attention", "mla", "mamba"]),
)
NAMESPACES = st.builds(
    Namespace,
    rank=st.integers(0, 4096),
    kv_cache_groups=st.lists(GROUPS, max_size=3).map(tuple),
    layout=st.sampled_from([None, "LBHNC", "BHLNC"]),
    is_parallelism_agnostic=st.sampled_from([None, True, False]),
    **dict.fromkeys(("tokens_per_hash", "blocks_per_chunk", "tp_size", "pp_size", "pcp_size", "dcp_size"), SIZES),
    **dict.fromkeys(("model_name", "dtype", "inference_engine"), NAMES),
    **dict.fromkeys(("canonical_format", "weights_revision", "adapter"), st.none() | NAMES),
    **dict.fromkeys(("replicated_layout", "parallel_agnostic"), st.booleans()),
)
NAMING = st.sampled_from(sorted(NAMINGS))
KEYS = st.builds(make_offload_key, st.binary(max_size=40), st.integers(0, 2**32 - 1))


@pytest.mark.parametrize("name", ["", "lost+found", "m_e58d9229ebb8", "m_e58d9229ebb8_r", "m_e58d9229ebb8_r00", "_r0"])
def test_other_folders_are_no_folders_of_chunks(name):
    assert read_folder(name) is None


@given(namespace=NAMESPACES, key=KEYS, naming=NAMING)
def test_a_name_gives_back_its_key_in_its_naming_alone(namespace, key, naming):
    mapper = FileMapper(namespace, naming)
    other = FileMapper(namespace, "flat" if naming == "vllm" else "vllm")
    rank = 0 if mapper.parallel_agnostic else namespace.rank
    assert mapper.key(mapper.name(key)) == key
    assert mapper.key(os.path.normpath(mapper.name(key))) == key  # As a directory walk sees it.
    assert other.key(mapper.name(key)) is None
    folder, _, name = mapper.name(key).partition("/")
    assert (read_folder(folder), NAMINGS[naming].key(name)) == ((mapper.folder, rank, naming), key)


@given(namespace=NAMESPACES, key=KEYS, place=st.integers(0), letter=st.characters(), naming=NAMING)
def test_a_name_with_a_letter_changed_is_no_name_of_the_same_key(namespace, key, place, letter, naming):
    mapper = FileMapper(namespace, naming)
    name = mapper.name(key)
    place %= len(name)
    changed = name[:place] + letter + name[place + 1 :]
    found = mapper.key(changed)
    assert found is None or changed in (mapper.name(found), os.path.normpath(mapper.name(found)))


@given(namespace=NAMESPACES, key=KEYS, naming=NAMING)
def test_a_name_stays_in_the_folder_that_it_is_put_in(namespace, key, naming):
    mapper = FileMapper(namespace, naming)
    for name in (mapper.name(key), mapper.config_name):
        assert not name.startswith("/")
        assert not {".", ".."} & set(name.split("/"))
        assert "\0" not in name
        assert max(len(part.encode()) for part in name.split("/")) <= 255


DIGITS = "00" * 32
NOT_OURS = (
    "000/00_g0 000/00_g0/# 000/00_g0/#.bin.tmp 000/00_g0/#.bin_12345.tmp 000/00_g0/#.BIN 001/00_g0/#.bin "
    "000/01_g0/#.bin 00/000_g0/#.bin 00000_g0/#.bin /000/00_g0/#.bin _g0/#.bin 000/00_g00/#.bin 000/00_g+1/#.bin "
    "000/00_g-1/#.bin 000/00_g1_0/#.bin 000/00_g٣/#.bin 000/00_g4294967296/#.bin 000/00_g/#.bin "
    "../default_e58d9229ebb8_r0/000/00_g0/#.bin"
)
STRANGE = [
    *("", ".", "m_e58d9229ebb8", f"default_e58d9229ebb8_r1/000/00_g0/{DIGITS}.bin"),
    *(f"{where}default_e58d9229ebb8_r0/000/00_g0/{DIGITS}.bin" for where in ("/", "./", "x/../")),
    *(f"default_e58d9229ebb8_r0/{name.replace('#', DIGITS)}" for name in NOT_OURS.split()),
    f"default_e58d9229ebb8_r0/000/00_g0/{DIGITS}.bin\n",
    f"default_e58d9229ebb8_r0/000/00_g0/{DIGITS[1:]}.bin",
    f"default_e58d9229ebb8_r0/fff/ff_g0/{'FF' * 32}.bin",
    f"default_e58d9229ebb8_r0/FFF/FF_g0/{'FF' * 32}.bin",
    FileMapper(Namespace(model_name="another")).name(make_offload_key(bytes(32))),
    FileMapper(Namespace(model_name="default")).config_name,
]


@pytest.mark.parametrize("name", STRANGE)
def test_a_name_that_is_not_ours_has_no_key(name):
    assert FileMapper(Namespace(model_name="default")).key(name) is None


@pytest.mark.parametrize("short", [b"", b"a", b"abc"])
def test_a_key_without_a_group_has_no_name(short):
    with pytest.raises(ValueError, match=f"{len(short)} bytes"):
        FileMapper(Namespace(model_name="default")).name(OffloadKey(short))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_name": ""}, "model_name: ''"),
        ({"model_name": "a\0b"}, "model_name: 'a\\x00b' given, a name without NUL"),
        ({"model_name": "\udc80"}, "model_name: text with lone surrogates given, text that UTF-8 can encode"),
        ({"model_name": "é" * 121}, "model_name: makes a folder's name of 258 bytes, at most 255"),
        ({"model_name": "m", "blocks_per_chunk": 0}, "blocks_per_chunk: 0 given"),
        ({"model_name": "m", "blocks_per_chunk": True}, "blocks_per_chunk: true given"),
        ({"model_name": "m", "dtype": 16}, "dtype: 16 given, text accepted"),
        ({"model_name": "m", "kv_cache_groups": [{"layer_names": ["\ud800"]}]}, "kv_cache_groups[0].layer_names[0]: "),
    ],
)
def test_a_namespace_that_cannot_be_named_is_refused_by_its_field(fields, message):
    with pytest.raises(ConfigError) as made:
        Namespace(**fields)
    assert str(made.value).startswith(message)
    with pytest.raises(ConfigError) as decoded:
        decode(Namespace, fields, where="namespace")
    assert str(decoded.value).startswith(f"namespace.{message}")


@pytest.mark.parametrize(
    ("fact", "message"),
    [({"rank": -1}, "rank: -1 given"), ({"tp_size": 0}, "tp_size: 0 given"), ({"tp_size": True}, "tp_size: true")],
)
def test_a_fact_that_cannot_be_is_refused_and_no_file_states_any(fact, message):
    with pytest.raises(ConfigError, match=f"^{message}"):
        Namespace(model_name="m", **fact)
    with pytest.raises(ConfigError, match=f"^{next(iter(fact))}: no such field"):
        decode(Namespace, {"model_name": "m"} | fact)


def test_the_longest_model_name_makes_a_folder_and_a_longer_one_is_refused():
    assert len(FileMapper(Namespace(model_name="m" * 239)).name(ASCENDING).split("/")[0]) == 255
    with pytest.raises(ConfigError, match=r"^model_name: makes a folder's name of 256 bytes"):
        FileMapper(Namespace(model_name="m" * 235), "flat")


@given(namespace=NAMESPACES)
def test_a_namespace_survives_the_way_to_another_process(namespace):
    as_json = msgspec.json.decode(msgspec.json.encode(namespace), type=Namespace)
    assert as_json == msgspec.msgpack.decode(msgspec.msgpack.encode(namespace), type=Namespace) == namespace
    assert FileMapper(as_json).fingerprint == FileMapper(namespace).fingerprint


def test_weights_and_adapters_have_names_of_their_own_and_none_without_them():
    def folder(**given):
        return FileMapper(Namespace(model_name="default", **given)).folder

    kinds = [{}, {"weights_revision": "a"}, {"weights_revision": "b"}, {"adapter": "a"}]
    assert (len({folder(**kind) for kind in kinds}), folder()) == (len(kinds), "default_e58d9229ebb8")


VOUCHED = msgspec.structs.replace(QWEN, is_parallelism_agnostic=True)
REFUSALS = [
    (QWEN, {"parallel_agnostic": False}, "not asked for"),
    (QWEN, {"is_parallelism_agnostic": False}, "the LLM engine reports"),
    (QWEN, {"pcp_size": 2}, "context parallelism"),
    (QWEN, {"pp_size": 2}, "pipeline parallelism"),
    (QWEN, {"kv_cache_groups": ()}, "0 KV-cache groups"),
    (QWEN, {"kv_cache_groups": QWEN.kv_cache_groups * 2}, "2 KV-cache groups"),
    (QWEN, {"kv_cache_groups": (Group(attention="mamba"),)}, "attention is mamba"),
    (QWEN, {"kv_cache_groups": (Group(),)}, "not known: attention"),
    (QWEN, {"kv_heads_per_rank": None}, "not known: kv_heads_per_rank"),
    (QWEN, {"total_kv_heads": None}, "not known: total_kv_heads"),
    (QWEN, {"per_token_head_scales": None}, "not known: per_token_head_scales"),
    (QWEN, {"v2_model_runner": None}, "not known: v2_model_runner"),
    (QWEN, {"total_kv_heads": 2, "kv_heads_per_rank": 1}, "4 workers of 1 KV heads hold copies: there are 2"),
    (QWEN, {"per_token_head_scales": True}, "scales per token and head"),
    (QWEN, {"v2_model_runner": True}, "V2 model runner"),
    (VOUCHED, {"v2_model_runner": True}, "V2 model runner"),  # The engine's verdict does not outweigh known facts.
    (VOUCHED, {"per_token_head_scales": True}, "scales per token and head"),
    (VOUCHED, {"total_kv_heads": 4}, "hold copies: there are 4"),
    (QWEN, {"layout": None}, "this one is not known"),
    (QWEN, {"layout": "LBHNC"}, "this one is LBHNC"),
    (QWEN, {"blocks_per_chunk": 2}, "the 2 blocks of a chunk"),
    (DEEPSEEK, {"dcp_size": 2}, "context parallelism"),
    (DEEPSEEK, {"kv_cache_groups": (Group(attention="full_attention"),)}, "only MLA's latent KV"),
    (GEMMA, {"is_parallelism_agnostic": None}, "the canonical pages are not certified"),
    (GEMMA, {"is_parallelism_agnostic": False, "certified": True}, "the LLM engine reports"),
]


@pytest.mark.parametrize(("namespace", "change", "why"), REFUSALS)
def test_one_condition_that_fails_keeps_parallel_sizes_apart_and_says_so(namespace, change, why):
    assert FileMapper(namespace).parallel_agnostic
    refused = FileMapper(msgspec.structs.replace(namespace, **change))
    assert not refused.parallel_agnostic
    assert why in refused.why
    assert json.loads(refused.config_bytes)["parallel_agnostic"] is False
    assert json.loads(refused.config_bytes)["tp_size"] == namespace.tp_size


def test_the_engines_verdict_replaces_unknown_facts_except_the_layout():
    vouched = Namespace(
        model_name=QWEN.model_name,
        tp_size=4,
        kv_cache_groups=(Group(layer_names=layers(2)),),
        parallel_agnostic=True,
        is_parallelism_agnostic=True,
        layout="BHLNC",
    )
    assert FileMapper(vouched).folder == FileMapper(QWEN).folder
    assert not FileMapper(msgspec.structs.replace(vouched, layout=None)).parallel_agnostic


@pytest.mark.parametrize("namespace", [QWEN, DEEPSEEK, GEMMA])
def test_a_shared_cache_is_the_same_at_every_tensor_parallel_size(namespace):
    heads = namespace.total_kv_heads
    mappers = [
        FileMapper(
            msgspec.structs.replace(
                namespace, tp_size=size, rank=size - 1, kv_heads_per_rank=None if heads is None else heads // size
            )
        )
        for size in (1, 2, 4)
    ]
    assert len({mapper.name(ASCENDING) for mapper in mappers}) == 1
    assert len({mapper.config_bytes for mapper in mappers}) == 1
    assert len({mapper.fingerprint for mapper in mappers}) == 1


LAYOUTS = ["LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"]
AXES = "LBHNC"  # Layers, blocks of the chunk, heads, tokens, and a head's content.


def row(chunk, layout, workers):
    shares = np.split(chunk, workers, axis=AXES.index("H"))
    return b"".join(np.transpose(share, [AXES.index(axis) for axis in layout]).tobytes() for share in shares)


@pytest.mark.parametrize(("layout", "blocks"), list(itertools.product(LAYOUTS, [1, 2])))
def test_the_gate_opens_exactly_where_rows_are_the_same_at_every_size(layout, blocks):
    chunk = np.arange(3 * blocks * 8 * 2 * 2, dtype=np.uint16).reshape(3, blocks, 8, 2, 2)
    namespace = msgspec.structs.replace(QWEN, layout=layout, blocks_per_chunk=blocks)
    alike = len({row(chunk, layout, workers) for workers in (1, 2, 4, 8)}) == 1
    assert FileMapper(namespace).parallel_agnostic == alike


DIFFERENCES = [
    *({name: "other"} for name in ["model_name", "dtype", "inference_engine", "canonical_format", "weights_revision"]),
    *({name: 2} for name in ["tokens_per_hash", "blocks_per_chunk", "pp_size", "pcp_size", "dcp_size"]),
    *({"adapter": "lora"}, {"weights_revision": "main"}, {"replicated_layout": True}),
    *({"tp_size": 4}, {"rank": 0}, {"kv_cache_groups": ()}),
    *({"layout": "LBHNC"}, {"layout": "LBNHC"}, {"row_bytes": 4096}, {"row_bytes": 8192}),
    *({"v2_model_runner": True}, {"v2_model_runner": False}),
]


def test_whatever_gives_bytes_another_meaning_gives_another_fingerprint():
    mappers = [FileMapper(LLAMA)] + [FileMapper(msgspec.structs.replace(LLAMA, **change)) for change in DIFFERENCES]
    assert len({mapper.fingerprint for mapper in mappers}) == len(mappers)
    assert {len(mapper.fingerprint) for mapper in mappers} == {32}


def test_a_fingerprint_is_the_same_in_every_release():
    same = "a118c5bde910c4c4a0a302541bc996a9e3596f43e88e8a294f87c32a9a09266c"
    assert FileMapper(LLAMA).fingerprint.hex() == same


@pytest.mark.parametrize(
    "fact",
    [
        {},
        {"interop": None},
        {"tp_size": 2},
        {"pp_size": 2},
        *({name: False} for name in ("is_parallelism_agnostic", "parallel_agnostic")),
    ],
)
def test_only_one_workers_rows_go_by_vllms_names_where_that_is_asked_for(fact):
    asked = {"parallel_agnostic": True, "is_parallelism_agnostic": True, "layout": "LBHNC", "interop": "vllm"}
    mapper = FileMapper(Namespace(model_name="m", kv_cache_groups=(Group(),), **asked | fact))
    assert mapper.parallel_agnostic == (mapper.why == "") == (not fact)
    assert ("parallel_agnostic" in json.loads(mapper.config_bytes)) == bool(fact)


@given(digest=st.binary(max_size=64), group=st.integers(0, 2**32 - 1))
def test_a_key_is_the_hash_followed_by_four_big_endian_bytes(digest, group):
    key = make_offload_key(digest, group)
    assert key == digest + struct.pack(">I", group)
    assert (names.chunk_hash(key), names.group_index(key)) == (digest, group)


def test_a_key_without_a_group_belongs_to_the_first_one_and_a_group_that_does_not_fit_is_refused():
    assert make_offload_key(b"hash") == b"hash\0\0\0\0"
    for group in (-1, 2**32):
        with pytest.raises(OverflowError):
            make_offload_key(b"hash", group)
