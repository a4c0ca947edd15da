"""Text of others: however deep, long or hostile, it is refused in one short line that a terminal does not obey."""

import json

import pytest

from kvtier.backend import FileMapper, Namespace, TierContext
from kvtier.config import EngineConfig
from kvtier.errors import MESSAGE_HEAD_MAX, MESSAGE_TAIL_MAX, ConfigError, KVTierError
from kvtier.tools.cli import main
from kvtier.tools.replay.size import kv_bytes_per_token
from kvtier.tools.replay.traces import Trace
from kvtier_backends.fs import FsBackend, FsOptions

DEEP = b'{"a":' + b"[" * 100_000
LONG = b'{"' + b"\x1b[2J\xc2\x9b" * 20_000 + b'": 1}'
HOSTILE = "\x1b[2J\x9b\u202e" * 30_000
SMALL = {"cpu_bytes_to_use": "1MiB", "chunk_bytes": "16KiB"}

READERS = {
    "configuration.json": EngineConfig.load,
    "configuration.toml": EngineConfig.load,
    "model.json": kv_bytes_per_token,
    "trace.jsonl": lambda path: list(Trace(path)),
}


def is_short_and_harmless(error):
    return str(error).isprintable() and len(str(error)) <= 10 * (MESSAGE_HEAD_MAX + MESSAGE_TAIL_MAX)


@pytest.mark.parametrize("text", [DEEP, LONG], ids=["deep", "long"])
@pytest.mark.parametrize("name", READERS)
def test_a_file_of_anybodys_is_refused_in_a_short_line(tmp_path, name, text):
    path = tmp_path / name
    path.write_bytes(text + b"\n")
    with pytest.raises(KVTierError) as refused:
        READERS[name](str(path))
    assert is_short_and_harmless(refused.value)


def nested(depth):
    value = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    "given",
    [
        {"secondary_tiers": [{"type": "fs", "root": "/x", "deep": nested(5_000)}]},
        {"secondary_tiers": [{"type": "fs", "root": nested(5_000)}]},
        {"secondary_tiers": nested(5_000)},
        {"limits": nested(5_000)},
        {"namespace": {"model_name": HOSTILE + "\0"}},
        {"runner": HOSTILE},
        {"eviction_policy": HOSTILE},
        {HOSTILE: 1},
        {"limits": {HOSTILE: 1}},
        {"secondary_tiers": [{"type": HOSTILE}]},
        {"secondary_tiers": [{"type": f"{HOSTILE}:x"}]},
        {"secondary_tiers": [{"type": "fs", "root": "/x", HOSTILE: 1}]},
        {"secondary_tiers": [{"type": "fs", "root": "/x", "name": HOSTILE}] * 2},
        {"secondary_tiers": [{"type": "object", "url": f"s3://{HOSTILE}"}]},
        {"secondary_tiers": [{"type": "redis", "url": f"redis://{HOSTILE}"}]},
    ],
    ids=range(15),
)
def test_what_a_message_quotes_of_a_mapping_is_escaped_and_short(given):
    with pytest.raises(ConfigError) as refused:
        EngineConfig.from_dict(SMALL | given)
    assert is_short_and_harmless(refused.value)


@pytest.mark.parametrize("text", [DEEP, b'{"model_name": ' + b"[" * 900 + b"]" * 900 + b"}", LONG, b"[]"], ids=range(4))
async def test_a_foreign_config_json_ends_neither_a_start_nor_du(tmp_path, text, capsys):
    mapper = FileMapper(Namespace(model_name="m"))
    file = tmp_path / mapper.config_name
    file.parent.mkdir(parents=True)
    file.write_bytes(text)
    with pytest.raises(SystemExit) as ended:
        main(["du", str(tmp_path), "--json"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.rstrip("\n").replace("\n", "").isprintable()
    opening = FsBackend.open(FsOptions(root=str(tmp_path)), TierContext("fs", mapper, 4_096))
    if text not in (DEEP, LONG):
        with pytest.raises(ConfigError, match="fields are others"):
            await opening
        return
    await (await opening).aclose(10)
    assert json.loads(file.read_bytes())["model_name"] == "m"
