"""`kvtier prune` removes what it is told to and nothing else, and nothing at all without --yes."""

import asyncio
import json
import os
import time

import pytest

from kvtier.backend import Kind
from kvtier.testing.conformance.lender import key_of, keys_of
from kvtier_backends.fs.directory import FilesDirectory
from kvtier_backends.fs.disk.temporaries import Writer, temporary_name
from tests.tools.conftest import opened

DAY_S = 86_400
CHUNK_BYTES = 12_288


def age(path, days):
    used_at = time.time() - days * DAY_S
    os.utime(path, (used_at, used_at))


def left(paths):
    return [path.exists() for path in paths]


def namespace_of(path, root):
    return path.relative_to(root).parts[0]


def test_without_yes_it_only_says_what_would_go_and_with_it_just_that_goes(store, run, run_json, root):
    files = store(keys_of(3))
    age(files[0], 10)
    report = run_json("prune", root, "--older-than", "7d")
    assert report == {"files": 1, "bytes": CHUNK_BYTES, "namespaces": 0, "removed": False, "left_out": 0}
    told = "1 file of 12.0 KiB would be removed; add --yes to remove them\n"
    assert (run("prune", root, "--older-than", "7d"), left(files)) == ((0, told), [True] * 3)
    theirs = store(keys_of(1), model="other")
    age(theirs[0], 10)
    chosen = ("--namespace", namespace_of(files[0], root), "--yes")
    assert run_json("prune", root, "--older-than", "7d", *chosen) == report | {"removed": True}
    assert left(files + theirs) == [False, True, True, True]


@pytest.mark.parametrize(("size", "kept"), [("0B", 0), ("12KiB", 1), ("40 kB", 3), ("50%", 2), ("1GiB", 5)])
def test_the_longest_unused_go_until_the_rest_fits(store, run_json, root, size, kept):
    files = store(keys_of(5))
    for days, path in enumerate(files):
        age(path, days + 1)
    report = run_json("prune", root, "--to-size", size, "--yes")
    assert (report["files"], left(files)) == (5 - kept, [True] * kept + [False] * (5 - kept))
    assert [path.parents[1].exists() for path in files] == left(files)


def test_a_namespace_goes_as_a_whole_and_others_stay(store, run_json, root):
    ours, theirs = store(keys_of(3)), store(keys_of(2), model="other")
    (theirs[0].parent / temporary_name(Writer.this_process()._replace(started=1))).write_bytes(b"left")
    report = run_json("prune", root, "--namespace", namespace_of(theirs[0], root), "--yes")
    assert (report["files"], left(ours), report["namespaces"]) == (3, [True] * 3, 1)
    assert {folder.name.split("_")[0] for folder in root.glob("*_*")} == {"org"}


def test_leftovers_go_and_what_is_under_way_stays(store, run_json, root):
    (path,) = store([key_of(0)])
    here = Writer.this_process()
    live, dead = (path.parent / temporary_name(writer) for writer in (here, here._replace(started=1)))
    old, young = path.with_name(f"{path.name}_123.tmp"), path.with_name(f"{path.name}_456.tmp")
    for each in (live, dead, old, young):
        each.write_bytes(b"half")
    age(old, 1)
    report = run_json("prune", root, "--leftovers", "--yes")
    assert (report["files"], left([path, live, young]), left([dead, old])) == (2, [True] * 3, [False] * 2)


@pytest.mark.parametrize("layout", ["files", "segments"])
def test_somebody_elses_files_stay_however_old_and_whatever_is_pruned(store, run, root, layout):
    """Only names that a tier makes are its own, and those of vLLM's unfinished chunks."""
    (path,) = store([key_of(0)], layout=layout)
    folders = {next(root.glob("*/config.json")).parent, *(folder for folder in path.parents if root in folder.parents)}
    names = ("a.txt", "cafe.bin", "feed.bin", "notes.tmp", ".notes.tmp", "notes.bin_1.tmp", "a.tar", "00000001.seg.tmp")
    theirs = [folder / name for folder in folders for name in names]
    for each in theirs:
        each.write_bytes(b"not yours")
        age(each, 100)
    for rule in (["--leftovers"], ["--corrupt"], ["--older-than", "0s"], ["--namespace", namespace_of(path, root)]):
        assert run("prune", root, *rule, "--yes")[0] == 0
    assert left([path, *theirs]) == [False] + [True] * len(theirs)


def listed(directory):
    (place,) = directory.places()
    files = (file for part in directory.parts(place) for file in directory.files(place, part))
    return next(file for file in files if file.kind is Kind.CHUNK)


def test_a_chunk_that_a_tier_stored_again_after_it_was_listed_stays(store, root):
    (path,) = store([key_of(0)])
    directory = FilesDirectory.open(str(root))
    before = listed(directory)
    store([key_of(0)])
    assert not directory.remove(before)
    assert path.exists()
    after = listed(directory)
    path.unlink()
    assert not directory.remove(after)
    directory.close()


def test_a_list_names_each_file_that_goes_and_why(store, run, run_json, root, tmp_path):
    files = store(keys_of(3))
    age(files[0], 10)
    os.truncate(files[1], 100)
    names = [str(path.relative_to(root)) for path in files]
    call = ("prune", root, "--older-than", "7d", "--corrupt", "--list")
    report = run_json(*call)
    assert {row["file"]: row["why"] for row in report["list"]} == {names[0]: "unused", names[1]: "corrupt"}
    assert {row["file"]: row["bytes"] for row in report["list"]}[names[0]] == CHUNK_BYTES
    _, out = run(*call, "--json", tmp_path / "out.json")
    *lines, last = out.splitlines()
    assert sorted(line.split()[-2:] for line in lines) == sorted([["unused", names[0]], ["corrupt", names[1]]])
    assert last.startswith("2 files of ")
    assert (len(json.loads((tmp_path / "out.json").read_text())["list"]), left(files)) == (2, [True] * 3)


@pytest.mark.parametrize("layout", ["files", "segments"])
def test_an_emptied_namespace_leaves_nothing_behind(store, run, root, layout):
    store(keys_of(3), layout=layout)
    store(keys_of(3), layout=layout, rank=1)
    config, *_ = root.glob("*/config.json")
    first, second = sorted(path.name for path in root.glob("*_*") if path != config.parent)
    assert run("prune", root, "--namespace", first, "--yes")[0] == 0
    assert sorted(path.name for path in root.glob("*_*")) == sorted([second, config.parent.name])
    assert run("prune", root, "--to-size", "0B", "--yes")[1].endswith(" removed, and 1 empty namespace\n")
    assert os.listdir(root) == []


def test_a_namespace_that_a_live_engine_uses_keeps_its_folders(root, run):
    async def work():
        async with opened(root) as (tier, lender):
            await lender.keep(tier, keys_of(3))
            there = sorted(root.iterdir())
            assert (await asyncio.to_thread(run, "prune", root, "--to-size", "0B", "--yes"))[0] == 0
            assert sorted(root.iterdir()) == there

    asyncio.run(work())
    (name,) = (path.name for path in root.glob("*_*") if not (path / "config.json").exists())
    assert (run("prune", root, "--namespace", name, "--yes")[0], os.listdir(root)) == (0, [])


def test_a_write_budget_outlives_its_namespace_for_a_day(store, run, root):
    """Its file gone, a tier could write a part of its day's bytes again."""
    store(keys_of(3), write_budget_bytes_per_day=1 << 30)
    (budget,) = root.glob("*/write-budget*")
    assert run("prune", root, "--to-size", "0B", "--yes")[0] == 0
    assert [path.name for path in budget.parent.iterdir() if path.name != "config.json"] == [budget.name]
    assert run("du", root)[0] == 0
    store(keys_of(3))
    age(budget, 2)
    assert (run("prune", root, "--to-size", "0B", "--yes")[0], os.listdir(root)) == (0, [])
