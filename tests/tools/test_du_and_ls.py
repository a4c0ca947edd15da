import os

import pytest

from kvtier.testing.conformance.lender import key_of, keys_of
from kvtier_backends.fs.disk.temporaries import Writer, temporary_name

DAY_S = 86_400


def blocks_of(paths):
    return sum(path.stat().st_blocks * 512 for path in paths)


def namespace_of(path, root):
    return path.relative_to(root).parts[0]


def allocated_below(root):
    """Return what `du -s` does, without the directory itself."""
    return blocks_of(list(root.rglob("*")))


@pytest.mark.parametrize("naming", ["vllm", "flat", "segments"])
def test_du_counts_all_that_the_file_system_has_allocated(store, run_json, root, naming):
    """Free space in segments, folders, the tier's own files and strange ones included."""
    layout = {"layout": "segments"} if naming == "segments" else {"naming": naming}
    (path, *_) = store(keys_of(5), **layout)
    (path.parent / "strange").write_bytes(bytes(5_000))
    store(keys_of(2), rank=1, **layout)
    report = run_json("du", root)
    assert report["allocated_bytes"] == allocated_below(root)
    assert [row["chunks"] for row in report["namespaces"].values()] == [5, 2]
    assert report["allocated_bytes"] == report["bytes"] + report["beside_bytes"] > 0
    assert sum(row["allocated_bytes"] for row in report["namespaces"].values()) == report["allocated_bytes"]


@pytest.mark.parametrize("layout", ["files", "segments"])
def test_du_counts_blocks_and_no_holes(store, run_json, root, layout):
    """Whatever name a file of holes has: a chunk's, a segment's, an unfinished one's."""
    (path, *_) = store(keys_of(2), layout=layout)
    before = run_json("du", root)
    for name in ("a" * 64 + ".bin", "00000077.seg", temporary_name(Writer("00000000", 1, 1))):
        path.with_name(name).touch()
        os.truncate(path.with_name(name), 1 << 40)
    after = run_json("du", root)
    fields = ("bytes", "temporary_bytes", "leftover_bytes")
    assert [after[field] for field in fields] == [before[field] for field in fields]


def test_du_tells_what_is_under_way_from_what_was_left_behind(store, run_json, root):
    (path,) = store([key_of(0)])
    here = Writer.this_process()
    (path.parent / temporary_name(here)).write_bytes(bytes(4_096))
    (path.parent / temporary_name(here._replace(started=1))).write_bytes(bytes(4_096))
    vllms = path.with_name(f"{path.name}_123.tmp")
    vllms.write_bytes(b"")
    report = run_json("du", root)
    assert (report["temporaries"], report["leftovers"]) == (2, 1)
    assert (report["temporary_bytes"], report["leftover_bytes"]) == (4_096, 4_096)
    os.utime(vllms, (0, 0))
    report = run_json("du", root)
    assert (report["temporaries"], report["leftovers"]) == (1, 2)


@pytest.mark.parametrize("columns", ["60", None])
def test_dus_table_has_whole_names_in_a_narrow_terminal_and_lines_in_a_pipe(store, run, root, monkeypatch, columns):
    names = [namespace_of(store(keys_of(1), model=f"org/{'long' * 20}{number}")[0], root) for number in range(2)]
    monkeypatch.setenv("COLUMNS", columns) if columns else monkeypatch.delenv("COLUMNS")
    _, out = run("du", root)
    cells = [line.split(" ")[0] for line in out.splitlines() if not line.startswith(" ")]
    assert ("".join(cells), len(cells) == 4) == ("".join(["namespace", *names, "total"]), columns is None)
    assert out.isascii()


def test_du_works_without_a_configuration(store, run_json, root):
    (path,) = store([key_of(0)])
    for config in root.glob("*/config.json"):
        config.write_bytes(b'{"half')
    assert run_json("du", root)["namespaces"][namespace_of(path, root)]["model"] == ""


def test_ls_lists_every_chunk_with_its_size_age_and_group(store, run_json, root):
    keys = [key_of(0), key_of(1, group=3)]
    files = store(keys)
    long_ago = files[0].stat().st_mtime - 3 * DAY_S
    os.utime(files[0], (long_ago, long_ago))
    listed = {row["hash"]: row for row in run_json("ls", root)}
    assert set(listed) == {key[:-4].hex() for key in keys}
    for key, path, group in zip(keys, files, (0, 3), strict=True):
        row = listed[key[:-4].hex()]
        assert (row["group"], row["bytes"]) == (group, blocks_of([path]))
        assert (row["namespace"], root / row["file"]) == (namespace_of(path, root), path)
    assert 3 * DAY_S <= listed[keys[0][:-4].hex()]["age_s"] < 4 * DAY_S
    store(keys, model="other")
    assert len(run_json("ls", root, "--namespace", namespace_of(files[0], root))) == 2
    assert [len(run_json("ls", root, "--limit", limit)) for limit in (3, 99)] == [3, 4]


def test_lss_lines_are_for_people(store, run, root):
    (path,) = store([key_of(0)])
    status, out = run("ls", root)
    assert status == 0
    assert out.split() == [key_of(0)[:-4].hex(), "0", "12.0", "KiB", out.split()[4], "s", namespace_of(path, root)]
