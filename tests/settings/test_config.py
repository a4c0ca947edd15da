import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from kvtier.backend.namespace import FileMapper, Namespace
from kvtier.config import (
    Checked,
    EngineConfig,
    EngineLimits,
    PositiveSize,
    TierConfig,
    TierLimits,
    placed,
    tier_options,
)
from kvtier.errors import ConfigError
from kvtier.settings import decode
from kvtier_backends.dummy import DummyBackend

SMALL = {"cpu_bytes_to_use": "1MiB", "chunk_bytes": "16KiB"}


class ShelfOptions(Checked, frozen=True, forbid_unknown_fields=True, kw_only=True):
    root: str
    capacity_bytes: PositiveSize | None = None


class Shelf(DummyBackend):
    options_type = ShelfOptions


class GreedyOptions(Checked, frozen=True, forbid_unknown_fields=True, kw_only=True):
    limits: int = 0
    name: str = ""


class Greedy(Shelf):
    options_type = GreedyOptions


SHELF = f"{__name__}:Shelf"
GREEDY = f"{__name__}:Greedy"


def refused(given):
    with pytest.raises(ConfigError) as caught:
        EngineConfig.from_dict(given)
    return str(caught.value)


def test_a_small_configuration_is_enough():
    config = EngineConfig.from_dict(SMALL)
    assert config == EngineConfig(cpu_bytes_to_use=1 << 20, chunk_bytes=16 << 10)
    assert (config.rows, config.row_bytes, config.eviction_policy, config.runner) == (64, 16_384, "lru", None)
    assert (config.secondary_tiers, config.namespace.model_name) == ((), "default")


@pytest.mark.parametrize(
    ("chunk_bytes", "row_bytes"), [(1, 4_096), (4_095, 4_096), (4_096, 4_096), (4_097, 8_192), (1 << 40, 1 << 40)]
)
def test_a_row_is_a_chunk_padded_to_the_page(chunk_bytes, row_bytes):
    config = EngineConfig(cpu_bytes_to_use=3 * row_bytes + 1, chunk_bytes=chunk_bytes)
    assert (config.row_bytes, config.rows) == (row_bytes, 3)


def test_a_primary_of_no_row_or_of_too_many_is_refused_with_both_numbers():
    assert "hold 4,294,967,296 rows of 4,096" in refused({"cpu_bytes_to_use": 1 << 44, "chunk_bytes": 1})
    assert refused({"cpu_bytes_to_use": 8_191, "chunk_bytes": 4_097}) == (
        "cpu_bytes_to_use: 8,191 bytes given, which hold 0 rows of 8,192; "
        "at least 1 row and at most 4,294,967,295 accepted"
    )


def test_the_namespace_learns_how_long_a_row_is():
    short = EngineConfig.from_dict(SMALL | {"namespace": {"model_name": "m"}})
    long = EngineConfig.from_dict(SMALL | {"chunk_bytes": "20KiB", "namespace": {"model_name": "m"}})
    assert short.namespace == Namespace(model_name="m", row_bytes=16_384)
    assert FileMapper(short.namespace).folder == FileMapper(long.namespace).folder
    assert FileMapper(short.namespace).fingerprint != FileMapper(long.namespace).fingerprint


def test_a_changed_copy_is_checked_like_a_new_one():
    config = EngineConfig.from_dict(SMALL)
    assert msgspec.structs.replace(config, cpu_bytes_to_use=1 << 21).rows == 128
    with pytest.raises(ConfigError, match="cpu_bytes_to_use: 1 bytes given"):
        msgspec.structs.replace(config, cpu_bytes_to_use=1)


TIER = {"type": "fs", "root": "/x"}


def test_a_tiers_own_options_are_decoded_by_its_backend():
    tier = decode(TierConfig, {"type": SHELF, "root": "/x", "capacity_bytes": "1.5GB"})
    assert tier_options(tier, "secondary_tiers[0]") == ShelfOptions(root="/x", capacity_bytes=1_500_000_000)


def test_places_in_a_path_are_filled_in_inside_vllm_and_refused_elsewhere():
    tier = TierConfig(type="fs", options={"root": "/var/kv-{dp_rank}", "layout": "files"})
    message = (
        r"^secondary_tiers\[0\]\.root: '\{dp_rank\}' given in a path, \{dp_rank\} and \{engine_id\} accepted, inside"
    )
    with pytest.raises(ConfigError, match=message):
        tier_options(tier, "secondary_tiers[0]")
    here = placed(tier, {"dp_rank": "3", "engine_id": "blue"})
    assert here.options == {"root": "/var/kv-3", "layout": "files"}
    tier_options(here, "secondary_tiers[0]")
    with pytest.raises(ConfigError, match=r"'\{rank\}' given"):
        tier_options(placed(replace(tier, options={"root": "/kv/{rank}"}), {"dp_rank": "3"}), "secondary_tiers[0]")


OPTION_MISTAKES = [
    ({"type": SHELF, "root": "/x", "capacity_bytes": "0B"}, "secondary_tiers[1].capacity_bytes: '0B' given, bytes"),
    ({"type": SHELF, "root": "/x", "limts": {}}, "secondary_tiers[1].limts: no such field; did you mean 'limits'?"),
    ({"type": SHELF, "rot": "/x"}, "secondary_tiers[1].rot: no such field; did you mean 'root'? Known here: capacity_"),
    ({"type": "kvtier_nowhere:Tier"}, "secondary_tiers[1].type: tier type 'kvtier_nowhere:Tier': there is no module"),
    ({"type": GREEDY}, f"secondary_tiers[1].type: {GREEDY!r} has options named like fields of every tier: "),
]


@pytest.mark.parametrize(("given", "message"), OPTION_MISTAKES)
def test_a_mistake_in_a_tiers_own_options_is_named_by_its_path(given, message):
    with pytest.raises(ConfigError) as caught:
        tier_options(decode(TierConfig, given), "secondary_tiers[1]")
    assert str(caught.value).startswith(message)


PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"]), max_size=5), inner, max_size=3)
    ),
)
OPTIONS = st.dictionaries(st.text(st.characters(exclude_categories=["Cs"]), max_size=8), PLAIN, max_size=4)


@given(options=OPTIONS)
def test_a_configuration_survives_the_way_to_another_process(options):
    limits = EngineLimits(cascade_share=0.123, action_chunks=3)
    tiers = (TierConfig(type="dummy", limits=TierLimits(deadline_s=0.001), medium="CPU", options=options),)
    config = EngineConfig(cpu_bytes_to_use=1 << 40, chunk_bytes=1, secondary_tiers=tiers, limits=limits, events=True)
    assert msgspec.json.decode(msgspec.json.encode(config), type=EngineConfig) == config
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(config), type=EngineConfig) == config


TOML = """
cpu_bytes_to_use = "1MiB"
chunk_bytes = "16KiB"
eviction_policy = "s3fifo"

[namespace]
model_name = "meta-llama/Llama-3.1-8B"
kv_cache_groups = [{ tokens_per_block = 16, layer_names = ["model.layers.0"] }]

[limits]
lease_s = "3s"

[[secondary_tiers]]
type = "fs"
root = "/mnt/kv"
limits = { deadline_s = "10s", load_bytes_in_flight = "64MiB" }

[[secondary_tiers]]
type = "dummy"
name = "model of a disk"
"""


def write(folder, name, text):
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(path)


def unreadable(path):
    with pytest.raises(ConfigError) as caught:
        EngineConfig.load(path)
    message = str(caught.value)
    assert message.startswith(f"{os.fspath(path)}: ")
    return message.removeprefix(f"{os.fspath(path)}: ")


def test_toml_and_json_say_the_same(tmp_path):
    from_toml = EngineConfig.load(write(tmp_path, "engine.toml", TOML))
    assert from_toml == EngineConfig.load(Path(write(tmp_path, "engine.json", json.dumps(tomllib.loads(TOML)))))
    assert from_toml.limits.lease_s == 3.0
    assert from_toml.secondary_tiers[0].limits == TierLimits(deadline_s=10.0, load_bytes_in_flight=64 << 20)
    assert from_toml.secondary_tiers[0].options == {"root": "/mnt/kv"}
    assert [tier.name for tier in from_toml.secondary_tiers] == ["0:fs", "model of a disk"]


def test_a_mistake_in_a_file_is_named_by_file_and_path(tmp_path):
    path = write(tmp_path, "engine.toml", TOML.replace('"10s"', '"ten"'))
    assert unreadable(path).startswith("secondary_tiers[0].limits.deadline_s: 'ten' given, seconds as a number")
    path = write(tmp_path, "engine.toml", TOML + "since = 2026-01-01\n")
    assert unreadable(path).startswith("secondary_tiers[1].since: a value of type date given, text, a number")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.toml", "a = 1\nb = = 2\n", r"is malformed: Invalid value \(at line 2, column 5\)"),
        ("a.toml", "a = 1\na = 2\n", r"is malformed: .*overwrite.*line 2"),
        ("a.toml", b"a = 1 # \xff\n", r"is not UTF-8 at byte 8"),
        ("a.toml", "", r"cpu_bytes_to_use: missing"),
        ("a.json", '{\n"a": 1,\n}', r"is malformed: .*line [23]"),
        ("a.json", "", r"is malformed: Expecting value: line 1"),
        ("a.json", '{"a": 1, "b": 1, "a": 2}', r"is malformed: given twice: a$"),
        ("a.json", "[]", r"a list given, a table of fields accepted"),
        ("a.json", '{"cpu_bytes_to_use": NaN, "chunk_bytes": 1}', r"cpu_bytes_to_use: nan given"),
        (
            "a.json",
            '{"cpu_bytes_to_use": 4096, "chunk_bytes": 1, "runner": "\\ud800"}',
            r"runner: .* given, text that UTF-8 can encode accepted",
        ),
        ("a.json", '{"a": ' + "[" * 100_000, r"is malformed: nested too deeply"),
        ("a.toml", "a = " + "[" * 100_000, r"is malformed"),
        ("a.json", '{"a": ' + "[" * 900 + "]" * 900 + "}", r"is malformed: nested too deeply|a: no such field"),
        ("a.yaml", "a: 1", r"the file's name ends neither in \.toml nor in \.json"),
    ],
)
def test_a_file_that_is_no_configuration_is_refused(tmp_path, name, text, message):
    assert re.match(message, unreadable(write(tmp_path, name, text)))


def test_a_file_that_is_not_there_is_refused(tmp_path):
    assert unreadable(tmp_path / "a.toml") == "cannot be read: No such file or directory"
    (tmp_path / "a.toml").mkdir()
    assert unreadable(tmp_path / "a.toml") == "cannot be read: Is a directory"


def test_reading_a_configuration_imports_the_named_tiers_and_neither_torch_nor_a_client(outside, tmp_path):
    path = write(tmp_path, "engine.toml", TOML)
    program = (
        "import sys, kvtier.config; kvtier.config.EngineConfig.load(sys.argv[1]);"
        "names = {'.'.join(name.split('.')[:2]) for name in sys.modules};"
        "print(sorted(names & {'torch', 'vllm', 'mooncake', 'redis', 'obstore', 'kvtier_backends.redis',"
        "    'kvtier_backends.fs', 'kvtier_backends.dummy'}))"
    )
    done = subprocess.run([sys.executable, "-c", program, path], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['kvtier_backends.dummy', 'kvtier_backends.fs']"
