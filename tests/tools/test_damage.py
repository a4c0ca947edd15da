"""Every command agrees on what is wrong with a chunk, by its kind, without an engine's configuration."""

import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from xxhash import xxh3_64_intdigest

from kvtier.testing.conformance.lender import key_of, keys_of
from kvtier_backends.fs.disk.footer import FOOTER_BYTES
from tests.tools.command import check_refusal, verified
from tests.tools.command import run as run_command
from tests.tools.conftest import ROW_BYTES

HEADER_BYTES = 4_096  # Of a segment.
SLOT_BYTES = ROW_BYTES + FOOTER_BYTES
SLOT_AT = HEADER_BYTES + SLOT_BYTES  # Of the second slot.
Damage = Callable[[Path], object]


def overwrite(at, content):
    def damage(path):
        with path.open("r+b") as file:
            file.seek(at)
            file.write(content)

    return damage


def truncate(length):
    return lambda path: os.truncate(path, length)


def misplace(path):
    there = path.parents[1] / "ff_g0" / path.name
    there.parent.mkdir(exist_ok=True)
    path.rename(there)


def link(path):
    path.rename(path.parents[4] / "elsewhere")
    path.symlink_to(path.parents[4] / "elsewhere")


def pipe(path):
    path.unlink()
    os.mkfifo(path)


def make_later(path):
    page = bytearray(path.read_bytes()[ROW_BYTES:])
    struct.pack_into("<I", page, 8, 3)
    struct.pack_into("<Q", page, FOOTER_BYTES - 8, xxh3_64_intdigest(page[:-8]))
    overwrite(ROW_BYTES, bytes(page))(path)


class Damaged(NamedTuple):
    damage: Damage
    fault: str
    listed: bool = False  # By `ls`, which reads no file, and of a segment footers.
    naming: str = "vllm"


DAMAGES = {
    "empty": Damaged(truncate(0), "truncated"),
    "a byte less than a row": Damaged(truncate(ROW_BYTES - 1), "truncated", naming="flat"),
    "a byte less than a footer": Damaged(truncate(SLOT_BYTES - 1), "truncated"),
    "a byte too long": Damaged(truncate(SLOT_BYTES + 1), "overlong"),
    "a page too long": Damaged(truncate(SLOT_BYTES + 4_096), "overlong", naming="flat"),
    "all zeros": Damaged(lambda path: path.write_bytes(bytes(SLOT_BYTES)), "zeroed"),
    "a zeroed footer": Damaged(overwrite(ROW_BYTES, bytes(FOOTER_BYTES)), "zeroed", naming="flat"),
    "a stranger": Damaged(overwrite(ROW_BYTES, b"PK\3\4" * 1_024), "foreign"),
    "a damaged footer": Damaged(overwrite(ROW_BYTES + 70, b"\xff"), "footer"),
    "a flipped bit": Damaged(overwrite(5, b"?"), "payload", naming="flat"),
    "a zeroed page": Damaged(overwrite(4_096, bytes(4_096)), "payload"),
    "misplaced": Damaged(misplace, "misplaced", listed=True),
    "a link": Damaged(link, "foreign", listed=True),  # Its target must stay.
    "a pipe": Damaged(pipe, "foreign", listed=True),
    "a slot's payload": Damaged(overwrite(SLOT_AT + 5, b"\xff\xfe"), "payload", naming="segments"),
    "a slot's key": Damaged(overwrite(SLOT_AT + ROW_BYTES + 70, b"\xff\xfe"), "footer", naming="segments"),
    "a slot's magic": Damaged(overwrite(SLOT_AT + ROW_BYTES, b"\xff\xfe"), "foreign", naming="segments"),
    "a slot's checksum": Damaged(overwrite(SLOT_AT + ROW_BYTES + 4_085, b"\xff\xfe"), "footer", naming="segments"),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_verify_and_ls_agree_on_a_fault_and_prune_removes_just_that_chunk(store, run, run_json, root, kind):
    damage, fault, listed, naming = DAMAGES[kind]
    files = store(keys_of(3), **({"layout": "segments"} if naming == "segments" else {"naming": naming}))
    damage(files[0])
    before = [path.read_bytes() for path in files[1:]]
    report = run_json("verify", root, status=1)
    assert verified(report) == {"checked": 3, "corrupt": {fault: 1}}
    ((name, named),) = [(each["file"], each["fault"]) for each in report["files"]]
    rows = run_json("ls", root)
    assert len(rows) == run_json("du", root)["chunks"] == 3
    assert {row["file"]: row["fault"] for row in rows if row["fault"]} == ({name: fault} if listed else {})
    assert run("ls", root)[1].count(fault) == listed
    if naming == "segments":
        assert [row["hash"] is None for row in rows] == [False, fault != "payload", False]
    assert ([path.read_bytes() for path in files[1:]], named) == (before, fault)
    assert run_json("prune", root, "--corrupt", "--yes")["files"] == 1
    assert verified(run_json("verify", root)) == {"checked": 2}
    assert (root.parent / "elsewhere").exists() == (kind == "a link")


def test_a_slot_with_a_chunk_of_another_namespace_is_corrupt(store, run_json, root):
    (ours,) = store(keys_of(2), layout="segments")
    store(keys_of(2), model="other", layout="segments")
    (theirs,) = root.glob("other_*/*.seg")
    overwrite(HEADER_BYTES, theirs.read_bytes()[HEADER_BYTES : HEADER_BYTES + SLOT_BYTES])(ours)
    assert run_json("verify", root, status=1)["corrupt"] == {"namespace": 1}
    faults = {row["file"]: row["fault"] for row in run_json("ls", root) if row["fault"]}
    assert faults == {f"{ours.relative_to(root)}#0": "namespace"}


def test_all_kinds_are_counted_and_named_with_their_keys(store, run, run_json, root, monkeypatch):
    monkeypatch.setattr("kvtier.tools.directory.NAMED_MAX", 4)
    files = store(keys_of(6))
    truncate(10)(files[0])
    truncate(20)(files[1])
    files[2].write_bytes(bytes(SLOT_BYTES))
    content = files[3].read_bytes()
    files[3].write_bytes(files[4].read_bytes())
    files[4].write_bytes(content)
    status, out = run("verify", root)
    assert status == 1
    assert "6 chunks checked, 5 corrupt (swapped 2, truncated 2, zeroed 1), 0 without anything to verify them by" in out
    assert "and 1 more" in out
    assert sum(path.name in out.replace("\n", "") for path in files) == 4
    told = run_json("verify", root, status=1)["files"]
    names = {str(path.relative_to(root)): key.hex() for path, key in zip(files[:5], keys_of(5), strict=True)}
    assert {each["file"]: each["key"] for each in told} == names
    assert {each["state"] for each in told} == {"corrupt"}


def test_whole_directories_pass_and_one_namespace_can_be_chosen(store, run, root):
    store(keys_of(3))
    (bad, *_) = store(keys_of(3), model="other", row_bytes=4_096)
    (good, *_) = store(keys_of(3), rank=1, naming="flat")
    store(keys_of(5)[3:], row_bytes=4 * ROW_BYTES)  # Rows of two lengths in one namespace.
    status, out = run("verify", root)
    assert (status, out.startswith("11 chunks checked, 0 corrupt, 0 without anything to verify them by\n")) == (0, True)
    assert " read in " in out.splitlines()[-1]
    truncate(3)(bad)
    assert run("verify", root, "--namespace", good.relative_to(root).parts[0])[0] == 0
    assert run("verify", root)[0] == 1


@pytest.mark.parametrize("layout", ["files", "segments"])
def test_damage_of_encrypted_chunks_is_found_without_their_keys(store, run, run_json, root, monkeypatch, layout):
    monkeypatch.setenv("KVTIER_TEST_FS_SECRETS", "ab" * 32)
    seal = {"seal": "aes-256-gcm", "seal_key_env": "KVTIER_TEST_FS_SECRETS"}
    files = store(keys_of(3), layout=layout, naming="flat", **seal)
    monkeypatch.delenv("KVTIER_TEST_FS_SECRETS")
    status, out = run("verify", root)
    assert (status, "3 encrypted: undamaged; only a tier with the key can tell" in out) == (0, True)
    overwrite(4_096 + 5, b"damaged!")(files[0])  # Of a segment, in its first row. Ciphertext may have any one byte.
    assert verified(run_json("verify", root, status=1)) == {"checked": 3, "corrupt": {"payload": 1}, "sealed": 2}


def test_vllms_files_and_later_formats_are_corrupt_only_if_they_are_cut_off(store, run_json, root):
    """A row and nothing else, beside chunks of kvtier's and in a directory of vLLM's own."""
    files = store(keys_of(4))
    truncate(ROW_BYTES)(files[0])
    make_later(files[1])
    vllms = store(keys_of(3), model="vllms")
    for path in vllms:
        truncate(ROW_BYTES)(path)
    assert verified(run_json("verify", root)) == {"checked": 7, "unverified": 5}
    for path, length in zip(vllms, (100, 0), strict=False):
        truncate(length)(path)
    assert verified(run_json("verify", root, status=1)) == {"checked": 7, "corrupt": {"truncated": 2}, "unverified": 3}


def test_an_unknown_namespace_is_rejected(store, capsys, root):
    name = store([key_of(0)])[0].relative_to(root).parts[0]
    assert run_command("verify", root, "--namespace", "nonsense") == 2
    check_refusal(capsys, f"--namespace 'nonsense': not in the directory, which holds: {name}")


@pytest.mark.parametrize("layout", ["files", "segments"])
def test_a_chunk_that_is_replaced_while_verify_reads_it_is_not_corrupt(store, run_json, root, monkeypatch, layout):
    """An engine has removed the file, or is writing another chunk into the slot: its footer is to come."""
    path = store(keys_of(1), layout=layout, naming="flat")[0]
    whole, read = path.read_bytes(), os.pread

    def read_meanwhile(fd, length, at):
        if layout == "files" and path.exists():
            path.rename(aside := path.with_suffix(".tmp"))
            overwrite(at, b"another chunk's")(aside)
        content = read(fd, length, at)
        if layout == "segments" and length == SLOT_BYTES and path.read_bytes() == whole:
            overwrite(at, b"another chunk's")(path)
            content = read(fd, length, at)
            overwrite(at + 4_096, b"more of it")(path)
        return content

    monkeypatch.setattr(os, "pread", read_meanwhile)
    assert run_json("verify", root)["corrupt"] == {}
    assert not path.exists() or path.read_bytes() != whole


@pytest.mark.parametrize(("sample", "least", "most"), [("100%", 400, 400), ("25%", 30, 200), ("0.25", 30, 200)])
def test_a_sample_checks_about_that_share_and_counts_what_it_left_out(store, run_json, root, sample, least, most):
    """Bounds that a fair draw of 400 chunks passes except once in more than a thousand million calls."""
    store(keys_of(400), layout="segments", row_bytes=4_096)
    found = run_json("verify", root, "--sample", sample)
    assert least <= found["checked"] <= most
    assert found["checked"] + found["skipped"] == 400
    assert found["read_bytes"] == found["checked"] * (4_096 + FOOTER_BYTES)


def test_a_sample_still_names_all_faults_that_need_no_reading(store, run_json, root):
    misplace(store(keys_of(5))[0])
    report = run_json("verify", root, "--sample", "0.000001%", status=1)
    assert (report["corrupt"], report["skipped"]) == ({"misplaced": 1}, 4)
