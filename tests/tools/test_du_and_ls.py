"""`kvtier du` and `kvtier ls` say what there is, by namespace and by chunk."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvtier.testing.conformance.lender import key_of, keys_of
from kvtier_backends.fs.disk.temporaries import Writer, temporary_name

DAY_S = 86_400


def blocks_of(paths: list[Path]) -> int:
    return sum(path.stat().st_blocks * 512 for path in paths)


def namespace_of(path: Path, root: Path) -> str:
    return path.relative_to(root).parts[0]


@pytest.mark.parametrize("layout", ["files", "segments"])
def test_du_counts_blocks_and_no_holes(store, run_json, root: Path, layout: str) -> None:
    """Whatever name a file of holes has: a chunk's, a segment's, an unfinished one's."""
    (path, *_) = store(keys_of(2), layout=layout)
    before = run_json("du", root)
    for name in ("a" * 64 + ".bin", "00000077.seg", temporary_name(Writer("00000000", 1, 1))):
        path.with_name(name).touch()
        os.truncate(path.with_name(name), 1 << 40)
    after = run_json("du", root)
    fields = ("bytes", "temporary_bytes", "leftover_bytes")
    assert [after[field] for field in fields] == [before[field] for field in fields]


def test_du_counts_each_namespaces_chunks_and_blocks(store, run_json, root: Path) -> None:
    first, second = store(keys_of(5)), store(keys_of(2), model="other", naming="flat")
    report = run_json("du", root)
    assert report["namespaces"] == {
        namespace_of(first[0], root): {
            "model": "org/model",
            "chunks": 5,
            "bytes": blocks_of(first),
            "temporaries": 0,
            "temporary_bytes": 0,
            "leftovers": 0,
            "leftover_bytes": 0,
        },
        namespace_of(second[0], root): {
            "model": "other",
            "chunks": 2,
            "bytes": blocks_of(second),
            "temporaries": 0,
            "temporary_bytes": 0,
            "leftovers": 0,
            "leftover_bytes": 0,
        },
    }
    assert (report["chunks"], report["bytes"]) == (7, blocks_of(first + second))


def test_du_tells_what_is_under_way_from_what_was_left_behind(store, run_json, root: Path) -> None:
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


def test_dus_table_is_for_people(store, run, root: Path) -> None:
    first = store(keys_of(3))
    second = store(keys_of(2), model="other")
    status, out = run("du", root)
    assert status == 0
    for words in (namespace_of(first[0], root), namespace_of(second[0], root), "org/model", "total", "KiB"):
        assert words in out


def test_dus_table_has_whole_names_however_narrow_the_terminal(
    store, run, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    names = [namespace_of(store(keys_of(3), layout=layout)[0], root) for layout in ("files", "segments")]
    _, out = run("du", root)
    cells = [line.split("│")[1].strip() for line in out.splitlines() if line.startswith("│")]
    assert "".join(cells) == f"{names[0]}{names[1]}total"


def test_du_works_without_a_configuration(store, run_json, root: Path) -> None:
    (path,) = store([key_of(0)])
    for config in root.glob("*/config.json"):
        config.write_bytes(b'{"half')
    assert run_json("du", root)["namespaces"][namespace_of(path, root)]["model"] == ""


def test_ls_lists_every_chunk_with_its_size_age_and_group(store, run_json, root: Path) -> None:
    keys = [key_of(0), key_of(1, group=3)]
    files = store(keys)
    long_ago = files[0].stat().st_mtime - 3 * DAY_S
    os.utime(files[0], (long_ago, long_ago))
    listed = {row["hash"]: row for row in run_json("ls", root)}
    assert set(listed) == {key[:-4].hex() for key in keys}
    for key, path, group in zip(keys, files, (0, 3), strict=True):
        row = listed[key[:-4].hex()]
        assert row["group"] == group
        assert row["bytes"] == blocks_of([path])
        assert row["namespace"] == namespace_of(path, root)
        assert root / row["file"] == path
    assert 3 * DAY_S <= listed[keys[0][:-4].hex()]["age_s"] < 4 * DAY_S


@pytest.mark.parametrize("limit", [1, 3, 99])
def test_ls_stops_at_a_limit(store, run_json, root: Path, limit: int) -> None:
    store(keys_of(5))
    assert len(run_json("ls", root, "--limit", limit)) == min(limit, 5)


def test_ls_of_nothing_is_an_empty_list(run_json, run, root: Path) -> None:
    assert run_json("ls", root) == []
    assert run("ls", root) == (0, "")


def test_lss_lines_are_for_people(store, run, root: Path) -> None:
    (path,) = store([key_of(0)])
    status, out = run("ls", root)
    assert status == 0
    assert out.split() == [key_of(0)[:-4].hex(), "0", "12.0", "KiB", out.split()[4], "s", namespace_of(path, root)]


def test_ls_shows_one_namespace_if_asked(store, run_json, root: Path) -> None:
    first = store(keys_of(2))
    store(keys_of(3), model="other")
    rows = run_json("ls", root, "--namespace", namespace_of(first[0], root))
    assert {row["file"] for row in rows} == {str(path.relative_to(root)) for path in first}


@pytest.mark.usefixtures("outside")
def test_output_that_nobody_reads_is_no_traceback(store, root: Path) -> None:
    """As in `kvtier ls DIR | head -1`."""
    store(keys_of(3))
    command = f"{sys.executable} -c 'from kvtier.tools.cli import main; main()' ls {root} | head -c 1"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ran = subprocess.run(["bash", "-c", command], env=environment, capture_output=True, text=True, check=False)
    assert ran.stderr == ""


def test_the_json_of_a_listing_is_one_document(store, run, root: Path) -> None:
    store(keys_of(3))
    status, out = run("ls", root, "--json")
    assert status == 0
    assert len(json.loads(out)) == 3
    assert len(out.splitlines()) == 3
