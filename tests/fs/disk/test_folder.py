"""A directory is checked, tried and made before the first chunk, or refused and left as it was."""

import errno
import json
import os
from pathlib import Path

import pytest

from kvtier.errors import BackendUnavailable, ConfigError
from kvtier_backends.fs.disk.owner import OWNER


def entries(root):
    return sorted(str(path.relative_to(root)) for path in root.rglob("*"))


@pytest.fixture
def config(root, mapper):
    path = root / mapper.config_name
    path.parent.mkdir(parents=True)
    return path


def test_a_missing_root_is_made_with_its_config_and_opening_again_changes_nothing(open_folder, mapper, root):
    folder = open_folder()
    assert (root / mapper.config_name).read_bytes() == mapper.config_bytes
    assert entries(root) == sorted([OWNER, mapper.folder, mapper.config_name, folder.chunks])
    folder.close()
    before = (root / mapper.config_name).stat()
    (root / "notes.txt").write_text("mine")
    open_folder()
    assert (root / mapper.config_name).stat().st_mtime_ns == before.st_mtime_ns
    assert (root / "notes.txt").read_text() == "mine"


def test_direct_io_is_found_where_it_works(open_folder):
    for io, direct in {"auto": True, "direct": True, "buffered": False}.items():
        folder = open_folder(io=io)
        assert folder.direct is direct
        folder.close()


def test_another_style_of_config_is_the_same_and_another_namespace_refused(open_folder, mapper, root, config):
    config.write_text('{"model_name": "another"}')
    with pytest.raises(ConfigError, match=r"^root: .*config\.json"):
        open_folder()
    assert entries(root) == sorted([mapper.folder, mapper.config_name])
    config.write_text(json.dumps(json.loads(mapper.config_bytes)))
    open_folder()


@pytest.mark.parametrize("torn", [b"", b'{"model_na', b"\xff\xfe"])
def test_a_config_that_a_killed_writer_left_is_written_again(open_folder, mapper, config, torn, caplog):
    config.write_bytes(torn)
    open_folder()
    assert config.read_bytes() == mapper.config_bytes
    assert "not JSON" in caplog.text


def test_a_root_that_cannot_be_made_is_refused(open_folder, tmp_path, root):
    with pytest.raises(ConfigError, match=r"^root: .*missing/tier.*parent directory does not exist"):
        open_folder(root=str(tmp_path / "missing" / "tier"))
    assert entries(tmp_path) == []
    root.write_text("a file")
    for place in (root, root / "below"):
        with pytest.raises(ConfigError, match=r"^root: .*Not a directory"):
            open_folder(root=str(place))
    assert root.read_text() == "a file"
    for kernels in ("/proc", "/sys/kernel"):
        with pytest.raises(ConfigError, match=r"^root: "):
            open_folder(root=kernels)


@pytest.mark.parametrize("error", [errno.EACCES, errno.EROFS])
def test_a_directory_that_must_not_be_written_is_refused(open_folder, root, system_call, error):
    root.mkdir()
    system_call("mkdir", error=error)
    with pytest.raises(ConfigError, match=rf"^root: .*{os.strerror(error)}"):
        open_folder()
    assert [name for name in entries(root) if name != OWNER] == []


def test_nothing_is_left_of_a_root_that_was_made_in_vain(open_folder, root, system_call):
    fds = os.listdir("/proc/self/fd")
    system_call("preadv", error=5)
    with pytest.raises(BackendUnavailable, match="Input/output error"):
        open_folder()
    assert not root.exists()
    assert len(os.listdir("/proc/self/fd")) == len(fds)


def test_what_does_not_come_back_is_refused(open_folder, root, monkeypatch):
    read = os.preadv

    def damage(fd, buffers, at):
        done = read(fd, buffers, at)
        buffers[1][17] ^= 1
        return done

    monkeypatch.setattr(os, "preadv", damage)
    with pytest.raises(BackendUnavailable, match="does not come back"):
        open_folder()
    assert not root.exists()


@pytest.mark.parametrize("flag", ["open", "pwritev"])
def test_direct_io_that_is_refused_at_any_call_is_refused(open_folder, flag, monkeypatch):
    call = getattr(os, flag)

    def refuse_direct(what, *args, **kwargs):
        if (args[0] if flag == "open" else os.O_RDWR | _flags(int(what))) & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return call(what, *args, **kwargs)

    monkeypatch.setattr(os, flag, refuse_direct)
    with pytest.raises(ConfigError, match=r"^io: 'direct'"):
        open_folder(io="direct")
    assert not open_folder().direct


def _flags(fd):
    lines = Path(f"/proc/self/fdinfo/{fd}").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("flags:")), 8)
