"""What tests of the file tier stand on: a namespace, lent rows, tiers that are closed again, and small file systems."""

import asyncio
import gc
import json
import os
import signal
import subprocess
import sys
import threading
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from kvtier.backend.contract import ScanDone, TierContext
from kvtier.backend.namespace import FileMapper, Namespace, OffloadKey
from kvtier.testing.conformance import Lender
from kvtier_backends.fs import FsBackend, FsOptions
from kvtier_backends.fs.disk import below, capacity, trial
from kvtier_backends.fs.disk.footer import FOOTER_BYTES, Footer, read_footer
from kvtier_backends.fs.disk.root import Folder
from kvtier_backends.fs.segments import checkpoint
from kvtier_backends.fs.segments.segment import HEADER_BYTES

ROW_BYTES = 8_192
SECRETS = "KVTIER_TEST_FS_SECRETS"
WRITER_DEADLINE_S = 30.0
CALL_DEADLINE_S = 20.0

OpenTier = Callable[..., Awaitable[FsBackend]]
Mount = Callable[[str, str], Path]


@pytest.fixture
def row_bytes() -> int:
    return ROW_BYTES


@pytest.fixture
def mapper() -> FileMapper:
    return FileMapper(Namespace(model_name="org/model"))


@pytest.fixture
def lender() -> Iterator[Lender]:
    lender = Lender(ROW_BYTES)
    yield lender
    gc.collect()  # A test that caught an error is in a circle with its traceback, and so are the buffers in there.
    assert lender.take_back(), "somebody keeps a lent buffer"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A directory that is not there yet."""
    return tmp_path / "tier"


CONSTANTS: dict[str, Any] = {
    "checkpoint_s": (checkpoint, "CHECKPOINT_S"),
    "queue_bytes": (trial, "QUEUE_BYTES"),
    "low_water": (capacity, "LOW_WATER"),
}


@pytest.fixture
async def open_tier(root: Path, mapper: FileMapper, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[OpenTier]:
    """Open tiers of files over `root`, if not told otherwise; each is closed in the end.

    The names of `CONSTANTS` are taken, too, from then on. With `checkpoint_s=0` there is no checkpoint at the start.
    """
    opened: list[FsBackend] = []

    async def open_tier(**options: Any) -> FsBackend:
        if options.get("checkpoint_s") == 0:
            options["checkpoint_s"] = 3_600.0
            for path in Path(options.get("root", root)).glob("*/index_*"):
                path.unlink()
        for name in CONSTANTS.keys() & options.keys():
            monkeypatch.setattr(*CONSTANTS[name], options.pop(name))
        given = FsOptions(**{"root": str(root), "layout": "files", **options})  # type: ignore[arg-type]
        opened.append(await FsBackend.open(given, TierContext("0:fs", mapper, ROW_BYTES)))
        return opened[-1]

    yield open_tier
    for tier in opened:
        assert await tier.aclose(20) == (0,)


@pytest.fixture
def scanned() -> Callable[[FsBackend], Awaitable[None]]:
    """Wait for the end of a tier's start-up scan."""

    async def scanned(tier: FsBackend) -> None:
        async with asyncio.timeout(CALL_DEADLINE_S):
            async for event in tier.watch():
                if isinstance(event, ScanDone):
                    return

    return scanned


def segments(root: Path) -> list[Path]:
    return sorted(root.glob("*_segments/*.seg"))


class Place(NamedTuple):
    """Where a chunk's row lies, and its footer behind it: a whole file, or a slot of a segment."""

    path: Path
    begins: int

    def read(self) -> bytes:
        return self.path.read_bytes()[self.begins : self.begins + ROW_BYTES + FOOTER_BYTES]

    def overwrite(self, at: int, content: bytes) -> None:
        with self.path.open("r+b") as file:
            file.seek(self.begins + at)
            file.write(content)


@pytest.fixture
def place_of(root: Path, path_of: Callable[[OffloadKey], Path]) -> Callable[[OffloadKey], Place]:
    """Find a key's newest chunk on the disk, whatever its layout."""

    def place_of(key: OffloadKey) -> Place:
        if path_of(key).exists():
            return Place(path_of(key), 0)
        found: list[tuple[int, Place]] = []
        for segment in segments(root):
            content = memoryview(segment.read_bytes())
            for begins in range(HEADER_BYTES, len(content), ROW_BYTES + FOOTER_BYTES):
                footer = read_footer(content[begins + ROW_BYTES : begins + ROW_BYTES + FOOTER_BYTES])
                if isinstance(footer, Footer) and footer.key == key:
                    found.append((footer.sequence, Place(segment, begins)))
        assert found, f"{key.hex()} is nowhere"
        return max(found)[1]  # What else has the key waits to be wiped.

    return place_of


@pytest.fixture
def path_of(root: Path, mapper: FileMapper) -> Callable[[OffloadKey], Path]:
    """Return where a key's file is, by either naming."""
    flat = FileMapper(mapper.namespace, "flat")

    def path_of(key: OffloadKey) -> Path:
        return root / flat.name(key) if (root / flat.name(key)).exists() else root / mapper.name(key)

    return path_of


@pytest.fixture(params=["xxh3", "aes-256-gcm"])
def seal(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Seal in every way: return the options that say so."""
    monkeypatch.setenv(SECRETS, "ab" * 32)
    return {} if request.param == "xxh3" else {"seal": request.param, "seal_key_env": SECRETS}


class SystemCall:
    """A function of `os` that a test counts, and that sticks or fails: always, or where `only` says so.

    `open` is also that of names of several parts.
    """

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        name: str,
        *,
        sticks: bool = False,
        error: int = 0,
        only: Callable[..., bool] = lambda *args, **kwargs: True,
    ) -> None:
        self.times = 0
        self._entered = threading.Semaphore(0)
        self._opened = threading.Event()
        self._error = error
        self._only = only
        self._call = getattr(os, name)
        if not sticks:
            self._opened.set()
        monkeypatch.setattr(os, name, self)
        if name == "open":
            open_beneath = below.open_beneath

            def opened(root_fd: int, name: str, flags: int) -> int:
                self._come(name, flags)
                return open_beneath(root_fd, name, flags)

            monkeypatch.setattr(below, "open_beneath", opened)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._come(*args, **kwargs)
        return self._call(*args, **kwargs)

    def _come(self, *args: Any, **kwargs: Any) -> None:
        self.times += 1
        if self._only(*args, **kwargs):
            self._meet(self._error)

    def _meet(self, error: int) -> None:
        self._entered.release()
        assert self._opened.wait(CALL_DEADLINE_S)
        if error:
            raise OSError(error, os.strerror(error))

    async def wait_entered(self, times: int = 1) -> None:
        """Wait until so many threads have come to it, or have passed it."""
        for _ in range(times):
            assert await asyncio.to_thread(self._entered.acquire, timeout=CALL_DEADLINE_S)

    def let_go(self) -> None:
        """Let who sticks go on, to fail if that was asked for; whoever comes later gets what the system gives."""
        self._error = 0
        self._opened.set()


MakeSystemCall = Callable[..., SystemCall]


@pytest.fixture
def system_call(monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeSystemCall]:
    """Put a `SystemCall` in place of a function of `os`; nobody sticks beyond the end of the test."""
    made: list[SystemCall] = []

    def system_call(name: str, **how: Any) -> SystemCall:
        made.append(SystemCall(monkeypatch, name, **how))
        return made[-1]

    yield system_call
    for call in made:
        call.let_go()


@pytest.fixture
def open_folder(root: Path, mapper: FileMapper) -> Iterator[Callable[..., Folder]]:
    opened: list[Folder] = []

    def open_folder(**options: object) -> Folder:
        given = FsOptions(**{"root": str(root), "layout": "files", **options})  # type: ignore[arg-type]
        folder = Folder(given, TierContext("0:fs", mapper, ROW_BYTES))
        folder.open()
        opened.append(folder)
        return folder

    yield open_folder
    for folder in opened:
        folder.close()


@pytest.fixture
def mount(outside: None, tmp_path: Path) -> Iterator[Mount]:
    """Mount a small file system of a kind; skips where that is not allowed."""
    mounted: list[Path] = []

    def mount(kind: str, options: str) -> Path:
        if os.geteuid() != 0:
            pytest.skip("mounting a file system needs root")
        path = tmp_path / f"{kind}-{len(mounted)}"
        path.mkdir()
        done = subprocess.run(["mount", "-t", kind, "-o", options, "none", str(path)], capture_output=True, check=False)
        if done.returncode:
            pytest.skip(f"cannot mount {kind}: {done.stderr.decode().strip()}")
        mounted.append(path)
        return path

    yield mount
    for path in mounted:
        subprocess.run(["umount", "-l", str(path)], check=True)


@pytest.fixture
def mount_image(outside: None, tmp_path: Path) -> Iterator[Callable[[str, int], Path]]:
    """Make and mount a small file system in a file; skips where that is not allowed."""
    mounted: list[Path] = []

    def mount_image(kind: str, size_bytes: int) -> Path:
        if os.geteuid() != 0:
            pytest.skip("mounting a file system needs root")
        image, path = tmp_path / f"{len(mounted)}.img", tmp_path / f"{kind}-image-{len(mounted)}"
        image.write_bytes(b"")
        os.truncate(image, size_bytes)
        path.mkdir()
        for command in ([f"mkfs.{kind}", "-q", str(image)], ["mount", "-o", "loop", str(image), str(path)]):
            try:
                done = subprocess.run(command, capture_output=True, check=False)
            except FileNotFoundError:
                pytest.skip(f"there is no {command[0]}")
            if done.returncode:
                pytest.skip(f"{command[0]}: {done.stderr.decode().strip()}")
        mounted.append(path)
        return path

    yield mount_image
    for path in mounted:
        subprocess.run(["umount", "-l", str(path)], check=True)


class FaultyDisk:
    """A mounted folder, and the process behind it."""

    def __init__(self, folder: Path, mountpoint: Path) -> None:
        self.path = mountpoint
        command = [
            sys.executable,
            os.path.join(os.path.dirname(__file__), "faulty_disk.py"),
            str(folder),
            str(mountpoint),
        ]
        self._server = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert self._server.stdout is not None
        self.ready = self._server.stdout.readline().strip() == "ready"

    def why_not(self) -> str:
        return self._server.communicate()[1].strip()

    def tell(self, fault: str) -> None:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        print(fault, file=self._server.stdin, flush=True)
        assert self._server.stdout.readline().strip() == fault

    def end(self) -> None:
        """As when its server dies."""
        self._server.kill()
        self._server.communicate()


@pytest.fixture
def disk(outside: None, tmp_path: Path) -> Iterator[FaultyDisk]:
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


@pytest.fixture
def taken_bytes() -> Callable[[Path], int]:
    return _taken_bytes


def _taken_bytes(root: Path) -> int:
    """Return what a tier's folders take, directories and all, as the file system counts it."""
    total = -os.lstat(root).st_blocks
    for folder, _, files in os.walk(root):
        for name in [".", *files]:
            with suppress(FileNotFoundError):
                total += os.lstat(os.path.join(folder, name)).st_blocks
    return total * 512


class Writer:
    """A process that hammers a directory, and can be stopped, looked at and killed."""

    def __init__(self, launcher: Process) -> None:
        self._launcher = launcher
        self.pid = 0
        self.done = [0, 0, 0, 0]
        self.wrong: list[str] = []
        self.refused = ""

    async def begin(self, seed: int) -> None:
        assert self._launcher.stdin is not None
        self._launcher.stdin.write(b"%d\n" % seed)
        self.done = [0, 0, 0, 0]
        await self._until("child")

    async def works(self) -> None:
        """Wait until it has stored something since it began."""
        stored = self.done[0]
        async with asyncio.timeout(WRITER_DEADLINE_S):
            while self.done[0] <= stored:
                self._hear(await self._line())

    async def listen(self) -> None:
        """Hear what it says, until cancelled."""
        while True:
            self._hear(await self._line())

    async def stop(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)
        await self._until("stopped")

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    async def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        await self._until("dead")
        self.pid = 0

    async def end(self) -> None:
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
        self._launcher.kill()
        await self._launcher.wait()

    async def _until(self, word: str) -> None:
        async with asyncio.timeout(WRITER_DEADLINE_S):
            while not (line := await self._line()).startswith(word):
                self._hear(line)
        if word == "child":
            self.pid = int(line.split()[1])

    async def _line(self) -> str:
        assert self._launcher.stdout is not None
        line = (await self._launcher.stdout.readline()).decode().strip()
        assert line, "the launcher ended"
        return line

    def _hear(self, line: str) -> None:
        if line.startswith("wrong"):
            self.wrong.append(line)
        elif line.startswith("refused"):
            self.refused = line
        elif line[0].isdigit():
            self.done = [int(word) for word in line.split()]


StartWriter = Callable[..., Awaitable["Writer"]]


@pytest.fixture
async def start_writer(outside: None, root: Path) -> AsyncIterator[StartWriter]:
    writers: list[Writer] = []

    async def start_writer(keys: int, **options: object) -> Writer:
        asked = {"row_bytes": ROW_BYTES, "keys": keys, "options": {"root": str(root), **options}}
        launcher = await asyncio.create_subprocess_exec(
            *(sys.executable, os.path.join(os.path.dirname(__file__), "capacity_writer.py"), json.dumps(asked)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        writers.append(Writer(launcher))
        return writers[-1]

    yield start_writer
    for writer in writers:
        await writer.end()
