"""The commands see chunks in segments as they see files, and wipe none that an engine may be writing beside."""

import asyncio
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvtier.backend.contract import TierContext
from kvtier.backend.namespace import FileMapper, Namespace
from kvtier.testing.conformance import Lender
from kvtier.testing.conformance.lender import keys_of, label
from kvtier.tools.cli import main
from kvtier_backends.fs import FsBackend, FsOptions
from kvtier_backends.fs.disk.footer import FOOTER_BYTES
from kvtier_backends.fs.segments.segment import read_header
from tests.tools.command import verified

ROW_BYTES = 8_192
SLOT_BYTES = ROW_BYTES + FOOTER_BYTES
HEADER_BYTES = 4_096


def options(root: Path) -> FsOptions:
    return FsOptions(root=str(root), layout="segments")


def overwrite(path: Path, at: int, content: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(content)


def recalled(root: Path, count: int) -> list[str]:
    async def work() -> list[str]:
        lender = Lender(ROW_BYTES)
        for key in keys_of(count):
            lender.chunk(key)
        context = TierContext("0:fs", FileMapper(Namespace(model_name="org/model")), ROW_BYTES)
        tier = await FsBackend.open(options(root), context)
        told = await lender.recall(tier, keys_of(count))
        assert await tier.aclose(10) == (0,)
        return list(told)

    return asyncio.run(work())


def test_du_and_ls_see_slots_beside_files(store, run_json, root: Path) -> None:
    store(keys_of(2))
    (segment,) = store(keys_of(5), layout="segments")
    report = run_json("du", root)["namespaces"][segment.parent.name]
    assert (report["chunks"], report["bytes"], report["model"]) == (5, 5 * SLOT_BYTES, "org/model")
    rows = run_json("ls", root, "--namespace", segment.parent.name)
    assert {row["hash"] for row in rows} == {key[:-4].hex() for key in keys_of(5)}
    assert {row["file"] for row in rows} == {f"{segment.parent.name}/00000001.seg#{place}" for place in range(5)}
    assert all(0 <= row["age_s"] < 1_000 for row in rows)


@pytest.mark.parametrize(
    ("at", "fault"), [(5, "payload"), (ROW_BYTES + 70, "footer"), (ROW_BYTES, "foreign"), (ROW_BYTES + 4_085, "footer")]
)
def test_verify_finds_a_damaged_slot_and_prune_wipes_it(store, run, run_json, root: Path, at: int, fault: str) -> None:
    (segment,) = store(keys_of(3), layout="segments")
    overwrite(segment, HEADER_BYTES + SLOT_BYTES + at, b"\xff\xfe")
    status, out = run("verify", root, "--json")
    assert (status, verified(out)) == (1, {"checked": 3, "corrupt": {fault: 1}})
    assert [row["hash"] is None for row in run_json("ls", root)] == [False, fault != "payload", False]
    assert run_json("prune", root, "--corrupt", "--yes") == {
        "files": 1,
        "bytes": SLOT_BYTES,
        "namespaces": 0,
        "removed": True,
        "left_out": 0,
    }
    assert run("verify", root)[0] == 0
    told = recalled(root, 3)
    assert sorted(told) == sorted([*[label(key) for key in keys_of(3) if label(key) in told], "ChunkMissing"])
    assert told.count("ChunkMissing") == 1


def test_pruned_chunks_stay_away_and_an_empty_segment_is_removed(store, run_json, root: Path) -> None:
    (segment,) = store(keys_of(4), layout="segments")
    assert run_json("prune", root, "--to-size", str(2 * SLOT_BYTES) + "B", "--yes")["files"] == 2
    told = recalled(root, 4)
    assert told.count("ChunkMissing") == 2
    assert told[:2] == [label(key) for key in keys_of(2)], "the head of a batch was stored last"
    assert run_json("prune", root, "--namespace", segment.parent.name, "--yes")["files"] == 2
    assert not segment.exists()
    assert recalled(root, 4) == ["ChunkMissing"] * 4


def test_a_segment_of_a_live_engine_is_read_left_alone_and_the_others_are_pruned(
    root: Path, store: Callable[..., list[Path]], capsys: pytest.CaptureFixture[str], run_json: Callable[..., Any]
) -> None:
    of_nobody = store(keys_of(4), model="z", layout="segments")
    taken_bytes = sum(path.stat().st_blocks * 512 for path in of_nobody)

    async def work() -> None:
        tier = await FsBackend.open(
            options(root), TierContext("0:fs", FileMapper(Namespace(model_name="a")), ROW_BYTES)
        )
        lender = Lender(ROW_BYTES)
        await lender.keep(tier, keys_of(3))
        assert (await asyncio.to_thread(run_json, "verify", root))["checked"] == 7
        with pytest.raises(SystemExit) as end:
            await asyncio.to_thread(main, ["prune", str(root), "--to-size", "0B", "--yes", "--json"])
        assert end.value.code == 1
        assert await lender.recall(tier, keys_of(3)) == [label(key) for key in keys_of(3)]
        assert await tier.aclose(10) == (0,)

    asyncio.run(work())
    told = capsys.readouterr()
    assert json.loads(told.out) == {"files": 4, "bytes": taken_bytes, "namespaces": 1, "removed": True, "left_out": 3}
    assert "an engine is writing to it" in told.err
    assert not any(path.exists() for path in of_nobody)


@pytest.mark.parametrize("size", ["50%", "3%", "0B"])
def test_a_prune_frees_what_it_says_and_a_tier_stores_there_again(root: Path, store, run_json, size: str) -> None:
    (segment,) = store(keys_of(40), layout="segments")
    before = segment.stat().st_blocks * 512
    report = run_json("prune", root, "--to-size", size, "--yes")
    left = segment.stat().st_blocks * 512 if segment.exists() else 0
    assert report["bytes"] == before - left >= report["files"] * SLOT_BYTES
    assert report["files"] == {"50%": 20, "3%": 39, "0B": 40}[size]
    assert run_json("verify", root)["checked"] == 40 - report["files"]
    store(keys_of(40, 40), layout="segments")
    assert run_json("verify", root)["checked"] == 80 - report["files"]
    assert sum(path.stat().st_blocks * 512 for path in root.glob("*_segments/*.seg")) >= before


@pytest.mark.parametrize("option", ["--corrupt", "--leftovers"])
def test_a_segment_with_a_damaged_first_page_goes_when_its_engine_has_gone(
    root: Path, capsys: pytest.CaptureFixture[str], run: Callable[..., tuple[int, str]], option: str
) -> None:
    async def work() -> None:
        context = TierContext("0:fs", FileMapper(Namespace(model_name="org/model")), ROW_BYTES)
        tier = await FsBackend.open(options(root), context)
        lender = Lender(ROW_BYTES)
        await lender.keep(tier, keys_of(3))
        (segment,) = root.glob("*_segments/*.seg")
        overwrite(segment, 40, b"?")
        with pytest.raises(SystemExit) as end:
            await asyncio.to_thread(main, ["prune", str(root), option, "--yes"])
        assert end.value.code == 1
        assert "an engine is writing to it" in capsys.readouterr().err
        assert await lender.recall(tier, keys_of(3)) == [label(key) for key in keys_of(3)]
        assert await tier.aclose(10) == (0,)

    asyncio.run(work())
    status, out = run("verify", root, "--json")
    assert (status, [(each["state"], each["fault"]) for each in json.loads(out)["files"]]) == (
        1,
        [("corrupt", "header")],
    )
    assert json.loads(run("du", root, "--json")[1])["leftovers"] == 1
    status, out = run("prune", root, option, "--yes", "--json")
    assert (status, json.loads(out)["files"]) == (0, 1)
    assert run("verify", root)[0] == 0
    assert not list(root.glob("*_segments/*.seg"))


@pytest.mark.parametrize(
    ("row_bytes", "slots"),
    [(ROW_BYTES, 1 << 60), (ROW_BYTES, 1 << 27), (1 << 62, 1), (1 << 44, 2), (0, 1 << 30), (ROW_BYTES, 0), (100, 5)],
)
def test_a_first_page_that_speaks_of_more_than_a_segment_can_hold_is_not_believed(
    root: Path, store: Callable[..., list[Path]], run: Callable[..., tuple[int, str]], row_bytes: int, slots: int
) -> None:
    """Its checksum is right: whoever may write there has made it. The file itself is empty but for some pages."""
    (segment,) = store(keys_of(2), layout="segments")
    header = read_header(segment.read_bytes()[:HEADER_BYTES])
    overwrite(segment, 0, header._replace(row_bytes=row_bytes, slots=slots).written())
    os.truncate(segment, 1 << 41)
    status, out = run("verify", root, "--json")
    assert (status, json.loads(out)["corrupt"]) == (1, {"header": 1})
    assert run("ls", root)[0] == 0
    assert run("du", root)[0] == 0
    assert recalled(root, 2) == ["ChunkMissing"] * 2


def test_a_segment_of_a_later_format_is_not_corrupt(
    root: Path, store: Callable[..., list[Path]], run: Callable[..., tuple[int, str]]
) -> None:
    (segment,) = store(keys_of(2), layout="segments")
    overwrite(segment, 8, (2).to_bytes(4, "little"))
    assert run("verify", root)[0] == 0
    assert run("prune", root, "--corrupt", "--yes")[0] == 0
    assert segment.exists()


def test_a_slot_that_is_written_to_while_verify_reads_it_is_not_corrupt(
    root: Path, store: Callable[..., list[Path]], run: Callable[..., tuple[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    (segment,) = store(keys_of(1), layout="segments")
    whole, read = segment.read_bytes(), os.pread

    def read_while_another_is_written(fd: int, length: int, at: int) -> bytes:
        content = read(fd, length, at)
        if length == SLOT_BYTES and segment.read_bytes() == whole:
            overwrite(segment, at, b"another chunk's")  # Its head is there, its footer is to come.
            content = read(fd, length, at)
            overwrite(segment, at + 4_096, b"more of it")
        return content

    monkeypatch.setattr(os, "pread", read_while_another_is_written)
    status, out = run("verify", root, "--json")
    assert (status, json.loads(out)["corrupt"]) == (0, {})
