import os
from contextlib import suppress

from kvtier.tools.outputs import check_writable, replacing


def test_a_file_takes_its_place_when_it_is_whole(tmp_path):
    path = tmp_path / "out"
    path.write_bytes(b"old")
    with replacing(str(path)) as file:
        file.write(b"new")
        assert path.read_bytes() == b"old"
    assert (path.read_bytes(), os.listdir(tmp_path)) == (b"new", ["out"])


def test_an_interrupted_file_leaves_what_was_there(tmp_path):
    path = tmp_path / "out"
    path.write_bytes(b"old")
    with suppress(KeyboardInterrupt), replacing(str(path)) as file:
        file.write(b"ne")
        raise KeyboardInterrupt
    assert (path.read_bytes(), os.listdir(tmp_path)) == (b"old", ["out"])


def test_a_link_still_leads_to_the_file_that_was_written(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "elsewhere" / "file")
    check_writable("--json", str(tmp_path / "out"))
    with replacing(str(tmp_path / "out")) as file:
        file.write(b"new")
    assert (tmp_path / "out").is_symlink()
    assert (tmp_path / "elsewhere" / "file").read_bytes() == b"new"


def test_a_pipe_is_written_directly(tmp_path):
    """A pipe, as `/dev/stdout` is one: replacing it would put a file where the pipe was."""
    reader, writer = os.pipe()
    path = f"/proc/self/fd/{writer}"
    check_writable("--json", path)
    with replacing(path) as file:
        file.write(b"new")
    assert os.read(reader, 10) == b"new"
    os.close(reader)
    os.close(writer)
