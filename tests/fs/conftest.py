"""What tests of the file tier stand on: a namespace, lent rows, tiers that are closed again, and small file systems."""

import asyncio
import gc
import json
import os
import signal
import subprocess
import sys
import threading
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import NamedTuple

import pytest

from kvtier.backend import FileMapper, Namespace, OffloadKey, ScanDone, TierContext
from kvtier.testing.conformance import Lender, label
from kvtier_backends.fs import FsBackend, FsOptions
from kvtier_backends.fs.disk import below, capacity
from kvtier_backends.fs.disk import root as disk_root
from kvtier_backends.fs.disk.footer import FOOTER_BYTES, Footer, read_footer
from kvtier_backends.fs.disk.root import Folder
from kvtier_backends.fs.segments import checkpoint
from kvtier_backends.fs.segments.segment import HEADER_BYTES
from tests.own import until_end

ROW_BYTES = 8_192
SLOT_BYTES = ROW_BYTES + FOOTER_BYTES  # A file's, too.
SECRETS = "KVTIER_TEST_FS_SECRETS"
DEADLINE_S = 20.0


def whole(keys, version=0):
    return [label(key, version) for key in keys]


def kinds(outcomes):
    return [type(outcome).__name__ for outcome in outcomes]


def segments(root):
    return sorted(root.glob("*_segments/*.seg"))


def temporaries(root):
    return [name for _, _, names in os.walk(root) for name in names if name.endswith(".tmp")]


def taken_bytes(root):
    total = -os.lstat(root).st_blocks
    for folder, _, files in os.walk(root):
        for name in [".", *files]:
            with suppress(FileNotFoundError):
                total += os.lstat(os.path.join(folder, name)).st_blocks
    return total * 512


async def until(true):
    async with asyncio.timeout(DEADLINE_S):
        while not true():
            await asyncio.sleep(0.001)


async def until_stored(tier, lender, keys):
    async with asyncio.timeout(DEADLINE_S):
        while any(await tier.store(lender.writes(keys))):
            await asyncio.sleep(0.001)


async def until_probed(tier, keys, *, there):
    async with asyncio.timeout(DEADLINE_S):
        while list(await tier.probe(keys)) != [there] * len(keys):
            await asyncio.sleep(0.001)


async def scanned(tier, *, complete=None):
    keys = set[OffloadKey]()
    async with asyncio.timeout(DEADLINE_S):
        async for event in tier.watch():
            if isinstance(event, ScanDone):
                assert complete in (None, event.complete)
                return keys
            keys.update(event.keys)
    raise AssertionError("the report ended")


end_of_scan = scanned


@pytest.fixture(params=["files", "segments"])
def layout(request):
    return str(request.param)


@pytest.fixture
def mapper():
    return FileMapper(Namespace(model_name="org/model"))


@pytest.fixture
def lender():
    lender = Lender(ROW_BYTES)
    yield lender
    if not lender.take_back():
        gc.collect()  # A test that caught an error is in a circle with its traceback, and so are the buffers in there.
        assert lender.take_back(), "somebody keeps a lent buffer"


@pytest.fixture
def root(tmp_path):
    return tmp_path / "tier"


CONSTANTS = {
    "checkpoint_s": (checkpoint, "CHECKPOINT_S"),
    "queue_bytes": (disk_root, "QUEUE_BYTES"),
    "low_water": (capacity, "LOW_WATER"),
}


@pytest.fixture
async def open_tier(root, mapper, lender, monkeypatch):
    """Open tiers over `root`, of files or of one small segment if not told otherwise; each is closed in the end.

    The names of `CONSTANTS` are taken, too, from then on. With `checkpoint_s=0` there is no checkpoint at the start.
    So are `engine`, `namespace` and `row_bytes` of its context. `holds`: keys to store; `scanned`: wait for the scan.
    """
    opened = []

    async def open_tier(holds=(), scanned=False, **options):
        given = {"root": str(root), "layout": "files", **options}
        if given.get("checkpoint_s") == 0:
            given["checkpoint_s"] = 3_600.0
            for path in Path(given["root"]).glob("*/index_*"):
                path.unlink()
        for name in CONSTANTS.keys() & given.keys():
            monkeypatch.setattr(*CONSTANTS[name], given.pop(name))
        if given["layout"] == "segments":
            given.setdefault("capacity_bytes", "1MiB")
        named = FileMapper(given.pop("namespace", mapper.namespace))
        context = TierContext("0:fs", named, given.pop("row_bytes", ROW_BYTES), engine=given.pop("engine", None))
        tier = await FsBackend.open(FsOptions(**given), context)
        opened.append(tier)
        if holds:
            await lender.keep(tier, holds)
        if scanned:
            await end_of_scan(tier)
        return tier

    yield open_tier
    for tier in opened:
        assert await tier.aclose(DEADLINE_S) == (0,)


@pytest.fixture
def stored(open_tier, lender):
    async def stored(keys, **options):
        assert await (await open_tier(**options, holds=keys)).aclose(DEADLINE_S) == (0,)

    return stored


class Place(NamedTuple):
    """Where a chunk's row lies, and its footer behind it: a whole file, or a slot of a segment."""

    path: Path
    begins: int

    def read(self):
        return self.path.read_bytes()[self.begins : self.begins + SLOT_BYTES]

    def overwrite(self, at, content):
        with self.path.open("r+b") as file:
            file.seek(self.begins + at)
            file.write(content)


def places_in(root, row_bytes=ROW_BYTES):
    """Return where each key's newest chunk lies on the disk, whatever its layout; older ones wait to be wiped."""
    found, chunk_bytes = dict[OffloadKey, tuple[int, Place]](), row_bytes + FOOTER_BYTES
    for path in (*root.rglob("*.bin"), *root.rglob("*.seg")):
        content, first = memoryview(path.read_bytes()), HEADER_BYTES if path.suffix == ".seg" else 0
        for begins in range(first, len(content) - chunk_bytes + 1, chunk_bytes):
            footer = read_footer(content[begins + row_bytes : begins + chunk_bytes])
            if isinstance(footer, Footer) and footer.sequence >= found.get(footer.key, (0,))[0]:
                found[footer.key] = footer.sequence, Place(path, begins)
    return {key: place for key, (_, place) in found.items()}


@pytest.fixture
def place_of(root):
    return lambda key: places_in(root)[key]


@pytest.fixture
def path_of(root, mapper):
    flat = FileMapper(mapper.namespace, "flat")

    def path_of(key):
        return root / flat.name(key) if (root / flat.name(key)).exists() else root / mapper.name(key)

    return path_of


@pytest.fixture(params=["xxh3", "aes-256-gcm"])
def seal(request, monkeypatch):
    """Seal in every way: return the options that say so."""
    monkeypatch.setenv(SECRETS, "ab" * 32)
    return {} if request.param == "xxh3" else {"seal": request.param, "seal_key_env": SECRETS}


class SystemCall:
    """A function of `os` that a test counts, and that sticks or fails: always, or where `only` says so.

    `open` is also that of names of several parts.
    """

    def __init__(self, monkeypatch, name, *, sticks=False, error=0, only=lambda *args, **kwargs: True):
        self.times, self._entered, self._opened = 0, threading.Semaphore(0), threading.Event()
        self._error, self._only, self._call = error, only, getattr(os, name)
        if not sticks:
            self._opened.set()
        monkeypatch.setattr(os, name, self)
        if name == "open":
            open_beneath = below.open_beneath

            def opened(root_fd, name, flags):
                self._come(name, flags)
                return open_beneath(root_fd, name, flags)

            monkeypatch.setattr(below, "open_beneath", opened)

    def __call__(self, *args, **kwargs):
        self._come(*args, **kwargs)
        return self._call(*args, **kwargs)

    def _come(self, *args, **kwargs):
        self.times += 1
        if self._only(*args, **kwargs):
            self._meet(self._error)

    def _meet(self, error):
        self._entered.release()
        assert self._opened.wait(DEADLINE_S)
        if error:
            raise OSError(error, os.strerror(error))

    async def wait_entered(self, times=1):
        """Wait until so many threads have come to it, or have passed it."""
        for _ in range(times):
            assert await asyncio.to_thread(self._entered.acquire, timeout=DEADLINE_S)

    async def met_by(self, call):
        task = asyncio.create_task(call)
        await self.wait_entered()
        return task

    def let_go(self):
        """Let who sticks go on, to fail if that was asked for; whoever comes later gets what the system gives."""
        self._error = 0
        self._opened.set()


@pytest.fixture
def system_call(request, monkeypatch):
    return lambda name, **how: until_end(request, made := SystemCall(monkeypatch, name, **how), made.let_go)


@pytest.fixture
def open_folder(request, root, mapper):
    def open_folder(**options):
        given = FsOptions(**{"root": str(root), "layout": "files", **options})
        folder = Folder(given, TierContext("0:fs", mapper, ROW_BYTES))
        folder.open()
        return until_end(request, folder, folder.close)

    return open_folder


@pytest.fixture
def mount(request, outside, tmp_path):
    """Mount a small file system of a kind, in memory or in a file; skips where that is not allowed."""

    def mount(kind, options="", *, image_bytes=0):
        if os.geteuid() != 0:
            pytest.skip("mounting a file system needs root")
        path = tmp_path / f"{kind}-{len(os.listdir(tmp_path))}"
        path.mkdir()
        commands = [["mount", "-t", kind, "-o", options, "none", str(path)]]
        if image_bytes:
            image = path.with_suffix(".img")
            image.write_bytes(b"")
            os.truncate(image, image_bytes)
            commands = [[f"mkfs.{kind}", "-q", str(image)], ["mount", "-o", "loop", str(image), str(path)]]
        for command in commands:
            try:
                done = subprocess.run(command, capture_output=True, text=True, check=False)
            except FileNotFoundError:
                pytest.skip(f"there is no {command[0]}")
            if done.returncode:
                pytest.skip(f"{command[0]}: {done.stderr.strip()}")
        request.addfinalizer(lambda: subprocess.run(["umount", "-l", str(path)], check=True))
        return path

    return mount


class FaultyDisk:
    def __init__(self, folder, mountpoint):
        self.path = mountpoint
        command = [sys.executable, str(Path(__file__).with_name("faulty_disk.py")), str(folder), str(mountpoint)]
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        self._server = subprocess.Popen(command, text=True, **pipes)
        self.ready = self._server.stdout.readline().strip() == "ready"

    def why_not(self):
        return self._server.communicate()[1].strip()

    def tell(self, fault):
        print(fault, file=self._server.stdin, flush=True)
        assert self._server.stdout.readline().strip() == fault

    def end(self):
        self._server.kill()
        self._server.communicate()


@pytest.fixture
def disk(outside, tmp_path):
    if os.geteuid() != 0 or not os.path.exists("/dev/fuse"):
        pytest.skip("mounting a file system of one's own needs root and FUSE")
    folder, mountpoint = tmp_path / "behind", tmp_path / "disk"
    folder.mkdir()
    mountpoint.mkdir()
    disk = FaultyDisk(folder, mountpoint)
    if not disk.ready:
        pytest.skip(disk.why_not())
    yield disk
    disk.end()
    subprocess.run(["umount", "-l", str(mountpoint)], check=True)


class Child:
    """A process that works on a tier until it is killed, and then another: see `child.py`."""

    def __init__(self, work, *, quiet=False, **asked):
        command = [sys.executable, str(Path(__file__).with_name("child.py")), work, json.dumps(asked)]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        pipes = dict.fromkeys(("stdin", "stdout"), subprocess.PIPE)
        errors = subprocess.DEVNULL if quiet else None
        self._process = subprocess.Popen(command, text=True, env=env, stderr=errors, **pipes)
        self._quiet, self.pid = quiet, 0

    def tell(self, word):
        print(word, file=self._process.stdin, flush=True)

    def line(self):
        line = self._process.stdout.readline().strip()
        assert line, "the child's parent has ended"
        return line

    def until(self, *words):
        lines = [self.line()]
        while lines[-1].split()[0] not in words:
            assert lines[-1] != "dead"
            lines.append(self.line())
        return lines

    def ask(self, words):
        self.tell(words)
        return int(self.until(words.split()[0])[-1].split()[1])

    def begin(self, seed=0):
        self.tell(seed)
        self.pid = int(self.until("child")[-1].split()[1])

    def works(self):
        stored = int(self.until("done")[-1].split()[1])
        while int(self.until("done")[-1].split()[1]) <= stored:
            pass

    def stop(self):
        os.kill(self.pid, signal.SIGSTOP)
        self.until("stopped")

    def go_on(self):
        os.kill(self.pid, signal.SIGCONT)

    def kill(self):
        with suppress(ProcessLookupError) if self._quiet else nullcontext():  # It may have died of its disk.
            os.kill(self.pid, signal.SIGKILL)
        self.pid = 0
        return self.until("dead")[:-1]

    def end(self):
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
        self._process.kill()
        self._process.communicate()


@pytest.fixture
def launch(request, outside, root):
    given = {"root": str(root), "row_bytes": ROW_BYTES, "options": {}}
    return lambda work, **asked: until_end(request, child := Child(work, **given | asked), child.end)
