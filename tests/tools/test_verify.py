"""`kvtier verify` finds every damage by its kind, without knowing an engine's configuration, and changes nothing."""

import asyncio
import json
import os
import re
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from xxhash import xxh3_64_intdigest

from kvtier.backend.contract import TierContext
from kvtier.backend.namespace import FileMapper, Namespace
from kvtier.testing.conformance import Lender
from kvtier.testing.conformance.lender import key_of, keys_of
from kvtier_backends.fs import FsBackend, FsOptions
from kvtier_backends.fs.disk.footer import FOOTER_BYTES
from tests.tools.command import check_refusal, verified
from tests.tools.command import run as run_command

ROW_BYTES = 8_192
Damage = Callable[[Path], None]


def summary(ran: tuple[int, str]) -> tuple[int, str]:
    """Return the status, and what verify says before the rate."""
    status, out = ran
    assert re.fullmatch(r"\d[^ ]* [KMG]?i?B read in [^ ]+ s, \d[^ ]* [KMG]?i?B/s", out.splitlines()[-1])
    return status, "\n".join([*out.splitlines()[:-1], ""])


def overwrite(at: int, content: bytes) -> Damage:
    def damage(path: Path) -> None:
        with path.open("r+b") as file:
            file.seek(at)
            file.write(content)

    return damage


def truncate(length: int) -> Damage:
    return lambda path: os.truncate(path, length)


def zero(path: Path) -> None:
    path.write_bytes(bytes(ROW_BYTES + FOOTER_BYTES))


def make_later(path: Path) -> None:
    page = bytearray(path.read_bytes()[ROW_BYTES:])
    struct.pack_into("<I", page, 8, 3)
    struct.pack_into("<Q", page, FOOTER_BYTES - 8, xxh3_64_intdigest(page[:-8]))
    overwrite(ROW_BYTES, bytes(page))(path)


DAMAGES: dict[str, tuple[Damage, str]] = {
    "empty": (truncate(0), "truncated"),
    "a page": (truncate(4_096), "truncated"),
    "a byte less than a row": (truncate(ROW_BYTES - 1), "truncated"),
    "a byte less than a footer": (truncate(ROW_BYTES + FOOTER_BYTES - 1), "truncated"),
    "a byte too long": (truncate(ROW_BYTES + FOOTER_BYTES + 1), "overlong"),
    "a page too long": (truncate(ROW_BYTES + 2 * FOOTER_BYTES), "overlong"),
    "all zeros": (zero, "zeroed"),
    "a zeroed footer": (overwrite(ROW_BYTES, bytes(FOOTER_BYTES)), "zeroed"),
    "a stranger": (overwrite(ROW_BYTES, b"PK\3\4" * 1_024), "foreign"),
    "a damaged footer": (overwrite(ROW_BYTES + 70, b"\xff"), "footer"),
    "a flipped bit": (overwrite(5, b"?"), "payload"),
    "a zeroed page": (overwrite(4_096, bytes(4_096)), "payload"),
}


@pytest.mark.parametrize("kind", DAMAGES)
@pytest.mark.parametrize("naming", ["vllm", "flat"])
def test_damage_is_found_by_its_kind(store, run, root: Path, kind: str, naming: str) -> None:
    files = store(keys_of(4), naming=naming)
    damage, fault = DAMAGES[kind]
    damage(files[1])
    before = [path.read_bytes() for path in files]
    status, out = run("verify", root, "--json")
    assert status == 1
    assert verified(out) == {"checked": 4, "corrupt": {fault: 1}}
    assert [path.read_bytes() for path in files] == before


def test_a_file_that_has_lost_its_name_meanwhile_is_not_corrupt(
    store, run, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine has removed it, or a writer of an earlier version has taken it for another chunk."""
    going, _ = store(keys_of(2), naming="flat")
    inode, pread = going.stat().st_ino, os.pread

    def overwrite_meanwhile(fd: int, length: int, at: int) -> bytes:
        if os.fstat(fd).st_ino == inode and going.exists():
            going.rename(aside := going.with_suffix(".tmp"))
            overwrite(at, b"another chunk's")(aside)
        return pread(fd, length, at)

    monkeypatch.setattr(os, "pread", overwrite_meanwhile)
    status, out = run("verify", root, "--json")
    assert not going.exists()
    assert (status, json.loads(out)["corrupt"]) == (0, {})


def test_all_kinds_are_counted_and_named(store, run, root: Path) -> None:
    files = store(keys_of(6))
    truncate(10)(files[0])
    truncate(20)(files[1])
    zero(files[2])
    content = files[3].read_bytes()
    files[3].write_bytes(files[4].read_bytes())
    files[4].write_bytes(content)
    status, out = run("verify", root)
    assert status == 1
    assert "6 chunks checked, 5 corrupt (swapped 2, truncated 2, zeroed 1), 0 without anything to verify them by" in out
    assert all(path.name in out.replace("\n", "") for path in files[:5])


def test_whole_directories_pass(store, run, root: Path) -> None:
    store(keys_of(3))
    store(keys_of(3), model="other", row_bytes=4_096)
    store(keys_of(3), rank=1, naming="flat")
    store(keys_of(5)[3:], row_bytes=4 * ROW_BYTES)  # Rows of two lengths in one namespace.
    assert summary(run("verify", root)) == (0, "11 chunks checked, 0 corrupt, 0 without anything to verify them by\n")


@pytest.mark.parametrize("layout", ["files", "segments"])
def test_damage_of_encrypted_chunks_is_found_without_their_keys(
    store, run, root: Path, monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    """It says what it cannot tell: whether somebody with the key has written them."""
    monkeypatch.setenv("KVTIER_TEST_FS_SECRETS", "ab" * 32)
    seal = {"seal": "aes-256-gcm", "seal_key_env": "KVTIER_TEST_FS_SECRETS"}
    files = store(keys_of(3), layout=layout, naming="flat", **seal)
    monkeypatch.delenv("KVTIER_TEST_FS_SECRETS")
    assert summary(run("verify", root)) == (
        0,
        "3 chunks checked, 0 corrupt, 0 without anything to verify them by, "
        "3 encrypted: undamaged; only a tier with the key can tell who wrote them\n",
    )
    overwrite(4_096 + 5, b"damaged!")(files[0])  # Of a segment, in its first row. Ciphertext may have any one byte.
    status, out = run("verify", root, "--json")
    assert status == 1
    assert verified(out) == {"checked": 3, "corrupt": {"payload": 1}, "sealed": 2}


def test_vllms_files_and_later_formats_are_corrupt_only_if_they_are_cut_off(store, run, root: Path) -> None:
    """A row and nothing else, beside chunks of kvtier's and in a directory of vLLM's own."""
    files = store(keys_of(4))
    truncate(ROW_BYTES)(files[0])
    make_later(files[1])
    vllms = store(keys_of(3), model="vllms")
    for path in vllms:
        truncate(ROW_BYTES)(path)
    status, out = run("verify", root, "--json")
    assert (status, verified(out)) == (0, {"checked": 7, "unverified": 5})
    for path, length in zip(vllms, (100, 0), strict=False):
        truncate(length)(path)
    status, out = run("verify", root, "--json")
    assert (status, verified(out)) == (1, {"checked": 7, "corrupt": {"truncated": 2}, "unverified": 3})


def test_one_namespace_can_be_chosen(store, run, root: Path) -> None:
    good, bad = store([key_of(0)]), store([key_of(1)], model="other")
    truncate(3)(bad[0])
    name = good[0].relative_to(root).parts[0]
    assert run("verify", root, "--namespace", name)[0] == 0
    assert run("verify", root)[0] == 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda root: root / "missing", "No such file or directory"),
        (lambda root: ((root / "file").write_bytes(b"") and None) or root / "file", "Not a directory"),
        (lambda root: (root / "photos").mkdir() or root, "holds no chunks"),
    ],
)
def test_a_directory_without_chunks_is_refused(
    root: Path, capsys: pytest.CaptureFixture[str], make: Callable[[Path], Path], message: str
) -> None:
    assert run_command("verify", make(root)) == 2
    check_refusal(capsys, message)


def test_an_unknown_namespace_is_refused(store, capsys: pytest.CaptureFixture[str], root: Path) -> None:
    name = store([key_of(0)])[0].relative_to(root).parts[0]
    assert run_command("verify", root, "--namespace", "nonsense") == 2
    check_refusal(capsys, f"--namespace 'nonsense': not in the directory, which holds: {name}")


async def test_an_engine_that_stores_and_deletes_meanwhile_is_no_corruption(root: Path, run) -> None:
    """Chunks are published by a rename: what is read is one or the other, never half of each."""
    mapper, lender = FileMapper(Namespace(model_name="org/model")), Lender(ROW_BYTES)
    tier = await FsBackend.open(FsOptions(root=str(root), layout="files"), TierContext("0:fs", mapper, ROW_BYTES))
    await lender.keep(tier, keys_of(60))
    stop = asyncio.Event()

    async def churn() -> None:
        version = 1
        while not stop.is_set():
            await lender.keep(tier, keys_of(60), version=version)
            await tier.delete(keys_of(20, start=20))
            version += 1

    churning = asyncio.create_task(churn())
    for _ in range(5):
        status, out = await asyncio.to_thread(run, "verify", root, "--json")
        found = json.loads(out)
        assert (status, found["corrupt"], found["unverified"]) == (0, {}, 0)
        assert found["checked"] >= 1
    stop.set()
    await churning
    assert await tier.aclose(10) == (0,)


@pytest.mark.parametrize(("sample", "least", "most"), [("100%", 400, 400), ("25%", 30, 200), ("0.25", 30, 200)])
def test_a_sample_checks_about_that_share_and_says_what_it_left_out(
    store, run_json, root: Path, sample: str, least: int, most: int
) -> None:
    """Bounds that a fair draw of 400 chunks passes but once in more than a thousand million calls."""
    store(keys_of(400), layout="segments", row_bytes=4_096)
    found = run_json("verify", root, "--sample", sample)
    assert least <= found["checked"] <= most
    assert found["checked"] + found["skipped"] == 400
    assert found["read_bytes"] == found["checked"] * (4_096 + FOOTER_BYTES)


def test_a_sample_still_names_all_that_is_wrong_without_reading(store, run, root: Path) -> None:
    files = store(keys_of(5))
    files[0].rename(files[0].parents[1] / files[0].name)
    status, out = run("verify", root, "--sample", "0.000001%", "--json")
    assert (status, json.loads(out)["corrupt"], json.loads(out)["skipped"]) == (1, {"misplaced": 1}, 4)
