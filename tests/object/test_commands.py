"""`kvtier prune`, `du`, `ls` and `verify` on a bucket: by its URL, or by the configuration of its tier."""

import json
from pathlib import Path

import pytest

from kvtier.backend import chunk_hash
from kvtier.testing.conformance import keys_of, label
from kvtier.tools.cli import main
from tests.object.conftest import CHUNK_BYTES


@pytest.fixture
def run(capsys):
    def run(*arguments: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as end:
            main([str(argument) for argument in arguments])
        told = capsys.readouterr()
        return end.value.code, told.out, told.err

    return run


@pytest.fixture
def config(tmp_path: Path, server, bucket) -> Path:
    """Return the configuration of an engine whose second tier is the bucket's."""
    path = tmp_path / "kvtier.toml"
    path.write_text(
        f"""
        cpu_bytes_to_use = "1MiB"
        chunk_bytes = {CHUNK_BYTES}
        [[secondary_tiers]]
        type = "fs"
        root = "{tmp_path}/tier"
        [[secondary_tiers]]
        type = "object"
        name = "bucket"
        url = "s3://{bucket}/kv"
        endpoint = "{server.endpoint}"
        """
    )
    return path


@pytest.fixture
def where(config: Path) -> str:
    return f"{config}#bucket"


async def test_without_yes_prune_only_says_what_would_go(opened, lender, where, run) -> None:
    tier, keys = await opened(), keys_of(5)
    await lender.keep(tier, keys)
    status, told, _ = run("prune", where, "--to-size", f"{2 * CHUNK_BYTES}B", "--json")
    assert status == 0
    assert json.loads(told)["removed"] is False
    assert await lender.recall(tier, keys) == [label(key) for key in keys]


async def test_prune_removes_by_namespace_and_leaves_the_others(opened, lender, where, run) -> None:
    one, other, keys = await opened(model_name="one"), await opened(model_name="other"), keys_of(700)
    await lender.keep(one, keys)
    await lender.keep(other, keys[:3])
    _, told, _ = run("du", where, "--json")
    namespaces = json.loads(told)["namespaces"]
    (name,) = [name for name in namespaces if name.startswith("one_")]
    assert namespaces[name] == {
        "model": "",
        "chunks": 700,
        "bytes": 700 * CHUNK_BYTES,
        "allocated_bytes": 700 * CHUNK_BYTES,
        **dict.fromkeys(("temporaries", "temporary_bytes", "leftovers", "leftover_bytes", "beside_bytes"), 0),
    }
    status, told, _ = run("prune", where, "--namespace", name, "--yes", "--json")
    assert (status, json.loads(told)) == (
        0,
        {"files": 700, "bytes": 700 * CHUNK_BYTES, "namespaces": 0, "removed": True, "left_out": 0},
    )
    assert await lender.recall(one, keys[:3]) == ["ChunkMissing"] * 3
    assert await lender.recall(other, keys[:3]) == [label(key) for key in keys[:3]]


async def test_prune_removes_by_age_and_by_size(opened, lender, where, run) -> None:
    tier, keys = await opened(), keys_of(6)
    await lender.keep(tier, keys)
    for rule, gone in ((["--older-than", "1h"], 0), (["--to-size", f"{6 * CHUNK_BYTES}B"], 0), (["--to-size=0B"], 6)):
        status, told, error = run("prune", where, *rule, "--yes", "--json")
        assert status == 0, error
        found = {"files": gone, "bytes": gone * CHUNK_BYTES, "namespaces": 0, "removed": True, "left_out": 0}
        assert json.loads(told) == found
    assert await lender.recall(tier, keys) == ["ChunkMissing"] * 6


@pytest.mark.parametrize("seal", ["xxh3", "aes-256-gcm"])
async def test_verify_finds_what_is_corrupt_and_prune_removes_it(
    opened, server, bucket, lender, config, where, run, monkeypatch, seal
) -> None:
    monkeypatch.setenv("KVTIER_TEST_KEY", "11" * 32)
    sealed = {} if seal == "xxh3" else {"seal": seal, "seal_key_env": "KVTIER_TEST_KEY"}
    config.write_text(config.read_text() + "".join(f"{name} = {value!r}\n" for name, value in sealed.items()))
    tier, keys = await opened(**sealed), keys_of(6)
    await lender.keep(tier, keys)
    names = [next(name for name in server.names(bucket) if chunk_hash(key).hex() in name) for key in keys]
    whole = [server.get(bucket, name) for name in names]
    server.put(bucket, names[0], whole[0][0][:-1] + bytes([whole[0][0][-1] ^ 1]), whole[0][1])
    server.put(bucket, names[1], *whole[2])
    server.put(bucket, names[2], whole[2][0][:-1], whole[2][1])
    server.put(bucket, names[3], whole[3][0], {"kvtier": "AAAA"})
    server.put(bucket, names[4], whole[4][0])  # As vLLM stores it.
    status, told, _ = run("verify", where, "--json")
    report = json.loads(told)
    assert status == 1
    assert {key: report[key] for key in ("checked", "corrupt", "unverified", "unreadable")} == {
        "checked": 6,
        "corrupt": {"foreign": 1, "length": 1, "payload": 1, "swapped": 1},
        "unverified": 1,
        "unreadable": 0,
    }
    status, told, _ = run("prune", where, "--corrupt", "--yes", "--json")
    assert (status, json.loads(told)["files"]) == (0, 4)
    assert sorted(server.names(bucket)) == sorted(names[4:])


async def test_sealed_chunks_whose_key_is_not_given_are_unverified(
    opened, bucket, lender, where, run, monkeypatch
) -> None:
    monkeypatch.setenv("KVTIER_TEST_KEY", "11" * 32)
    await lender.keep(await opened(seal="aes-256-gcm", seal_key_env="KVTIER_TEST_KEY"), keys_of(2))
    status, told, _ = run("verify", where)
    assert (status, told.splitlines()[0]) == (0, "2 chunks checked, 0 corrupt, 2 without anything to verify them by")


async def test_a_url_alone_does_where_the_environment_has_the_rest(
    opened, server, bucket, lender, run, monkeypatch
) -> None:
    keys = keys_of(3)
    await lender.keep(await opened(), keys)
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.endpoint)
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    status, told, _ = run("ls", f"s3://{bucket}/kv", "--json")
    assert status == 0
    assert {row["hash"] for row in json.loads(told)} == {chunk_hash(key).hex() for key in keys}
    assert all(row["bytes"] == CHUNK_BYTES and row["age_s"] < 3_600 for row in json.loads(told))


def test_what_is_no_bucket_of_a_tiers_is_refused_by_name(server, bucket, config, where, run) -> None:
    server.put(bucket, "kv/other/thing", b"")
    for told in ("holds no chunks; the URL that a tier has accepted",):
        status, _, error = run("du", where)
        assert (status, told in error) == (2, True), error
    server.remove_bucket(bucket)
    for given, status, told in (
        (where, 2, "404 NoSuchBucket"),
        (config, 2, f"one tier of type fs or object accepted; the configuration has: {config}#0:fs, {config}#bucket"),
        (f"{config}#none", 2, "one tier of type fs or object accepted"),
        ("file:///tmp", 2, "a tier of the type 'fs' keeps chunks in a directory"),
    ):
        ended = run("du", given)
        assert (ended[0], told in ended[2]) == (status, True), ended


async def test_a_bucket_that_cannot_be_reached_is_no_mistake_of_the_call(own_server, bucket, config, run) -> None:
    server = own_server()
    server.kill()
    config.write_text(config.read_text().replace("endpoint = ", f"endpoint = '{server.endpoint}' #"))
    assert run("du", f"{config}#bucket")[0] == 3


async def test_a_directory_is_found_by_its_configuration_too(config, run, tmp_path: Path) -> None:
    (tmp_path / "tier").mkdir()
    assert run("du", f"{config}#0:fs", "--json")[0] == 0


async def test_a_share_a_sample_and_an_object_in_the_wrong_place_are_as_in_a_directory(
    opened, server, bucket, lender, where, run
) -> None:
    await lender.keep(await opened(), keys_of(6))
    name = server.names(bucket)[0]
    server.put(bucket, f"{name.rpartition('/')[0]}/elsewhere/{name.rpartition('/')[2]}", *server.get(bucket, name))
    _, told, _ = run("ls", where, "--json")
    rows = json.loads(told)
    assert sorted(row["fault"] for row in rows) == [""] * 6 + ["misplaced"]
    status, told, _ = run("verify", where, "--sample", "0.000001%", "--json")
    report = json.loads(told)
    assert (status, report["corrupt"], report["skipped"]) == (1, {"misplaced": 1}, 6)
    _, told, _ = run("prune", where, "--corrupt", "--list", "--yes", "--json")
    assert [row["why"] for row in json.loads(told)["list"]] == ["corrupt"]
    _, told, _ = run("prune", where, "--to-size", "50%", "--json")
    assert json.loads(told)["files"] in (3, 6)  # All that were stored in one second go together.
