"""A file system that fails when it is told to, spoken to the kernel over /dev/fuse: `faulty_disk.py FOLDER MOUNTPOINT`.

It shows FOLDER, and says "ready". Then lines come on its standard input. `eio` fails reads and writes of files, `hang`
holds all requests, `EBUSY 20 7` fails 20 % of all requests with that error, by the seed 7: one half of them undone, the
other half done all the same. `well` ends each of these. When its input ends, so does it, and who waits for it gets
ENOTCONN.
"""

import ctypes
import errno
import os
import random
import struct
import sys
import threading

HEADER = struct.Struct("<IIQQIII4x")
READ, WRITE = 15, 16
SURE = {18, 25, 26, 29}  # Releases, and the beginning: nobody hears of their errors.
NO_REPLY = {2, 36, 42}  # Forgotten nodes and interrupts.
BUFFER_BYTES = 1 << 20
WRITE_MAX_BYTES = 128 << 10
ATTRIBUTES = struct.Struct("<6Q10I")


class Disk:
    def __init__(self, folder):
        self.healthy, self.fault, self._listed = threading.Condition(), "well", {}
        self._dice, self._errno, self._share = random.Random(), 0, 0.0
        self._paths, self._nodes = {1: folder}, {folder: 1}
        self._calls = {
            1: self._lookup,
            3: lambda node, _: struct.pack("<QII", 0, 0, 0) + self._attributes(self._paths[node]),
            4: self._set_attributes,
            9: self._make_folder,
            10: lambda node, body: os.unlink(self._child(node, body)) or b"",
            11: lambda node, body: os.rmdir(self._child(node, body)) or b"",
            12: lambda node, body: self._rename(node, *struct.unpack_from("<Q", body), body[8:]),
            14: lambda node, body: self._opened(self._paths[node], *struct.unpack_from("<I", body)),
            READ: self._read,
            WRITE: self._write,
            17: self._statistics,
            18: lambda _, body: os.close(*struct.unpack_from("<Q", body)) or b"",
            20: lambda _, body: os.fsync(*struct.unpack_from("<Q", body)) or b"",
            25: lambda _, __: b"",
            26: self._begin,
            27: self._open_folder,
            28: self._list,
            29: self._close_folder,
            30: lambda _, __: b"",
            34: lambda _, __: b"",
            35: self._create,
            43: self._allocate,
            45: lambda node, body: self._rename(node, *struct.unpack_from("<Q", body), body[16:]),
        }

    def err(self, name, percent, seed):
        self._dice, self._errno, self._share = random.Random(seed), getattr(errno, name), int(percent) / 100

    def answer(self, opcode, node, body):
        """Return the error, 0 if there is none, and what the kernel asked for."""
        with self.healthy:
            self.healthy.wait_for(lambda: self.fault != "hang")
        if self.fault == "eio" and opcode in (READ, WRITE):
            return errno.EIO, b""
        if opcode not in self._calls:
            return errno.ENOSYS, b""
        fails = self.fault.startswith("E") and opcode not in SURE and self._dice.random() < self._share
        if fails and self._dice.random() < 0.5:
            return self._errno, b""
        try:
            answer = self._calls[opcode](node, body)
        except OSError as error:
            return error.errno or errno.EIO, b""
        if fails:
            self._never_released(opcode, answer)
            return self._errno, b""
        return 0, answer

    def _never_released(self, opcode, answer):
        if opcode in (14, 35):
            os.close(*struct.unpack_from("<Q", answer, len(answer) - 16))

    def _begin(self, node, body):
        major, _ = struct.unpack_from("<II", body)
        return struct.pack("<IIIIHHIIHHI28x", major, 31, 0, 0, 16, 12, WRITE_MAX_BYTES, 1, 0, 0, 0)

    def _child(self, node, name):
        return os.path.join(self._paths[node], name.split(b"\0", 1)[0].decode())

    def _entry(self, path):
        attributes = self._attributes(path)
        node = self._nodes.setdefault(path, max(self._paths) + 1)
        self._paths[node] = path
        return struct.pack("<QQQQII", node, 0, 0, 0, 0, 0) + attributes

    def _attributes(self, path):
        found = os.lstat(path)
        times = [divmod(ns, 10**9) for ns in (found.st_atime_ns, found.st_mtime_ns, found.st_ctime_ns)]
        return ATTRIBUTES.pack(
            *(found.st_ino, found.st_size, found.st_blocks),
            *(seconds for seconds, _ in times),
            *(ns for _, ns in times),
            *(found.st_mode, found.st_nlink, found.st_uid, found.st_gid, 0, 4_096, 0),
        )

    def _lookup(self, node, body):
        return self._entry(self._child(node, body))

    def _set_attributes(self, node, body):
        path, (valid,) = self._paths[node], struct.unpack_from("<I", body)
        _, size, _, atime, mtime, _, atime_ns, mtime_ns = struct.unpack_from("<6Q2I", body, 8)
        if valid & 8:
            os.truncate(path, size)
        if valid & 32:
            os.utime(path, ns=(atime * 10**9 + atime_ns, mtime * 10**9 + mtime_ns))
        return struct.pack("<QII", 0, 0, 0) + self._attributes(path)

    def _make_folder(self, node, body):
        path = self._child(node, body[8:])
        os.mkdir(path)
        return self._entry(path)

    def _rename(self, node, target, names):
        old, new = names.split(b"\0")[:2]
        source, path = self._child(node, old), self._child(target, new)
        os.rename(source, path)
        if (moved := self._nodes.pop(source, None)) is not None:
            self._nodes[path], self._paths[moved] = moved, path
        return b""

    def _opened(self, path, flags):
        return struct.pack("<QII", os.open(path, flags & ~os.O_DIRECT & ~os.O_CREAT & ~os.O_EXCL), 1, 0)

    def _create(self, node, body):
        flags, mode = struct.unpack_from("<II", body)
        path = self._child(node, body[16:])
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, mode))
        return self._entry(path) + self._opened(path, flags)

    def _read(self, node, body):
        fd, offset, size = struct.unpack_from("<QQI", body)
        return os.pread(fd, size, offset)

    def _write(self, node, body):
        fd, offset, size = struct.unpack_from("<QQI", body)
        return struct.pack("<II", os.pwrite(fd, body[40 : 40 + size], offset), 0)

    def _allocate(self, node, body):
        fd, offset, length = struct.unpack_from("<QQQ", body)
        os.posix_fallocate(fd, offset, length)
        return b""

    def _open_folder(self, node, body):
        listing = max(self._listed, default=0) + 1
        self._listed[listing] = sorted(
            os.listdir(self._paths[node])
        )  # At once: no name goes missing between two parts.
        return struct.pack("<QII", listing, 0, 0)

    def _close_folder(self, node, body):
        del self._listed[struct.unpack_from("<Q", body)[0]]
        return b""

    def _list(self, node, body):
        listing, offset, size = struct.unpack_from("<QQI", body)
        listed = b""
        for place, name in enumerate(self._listed[listing][offset:], start=offset + 1):
            encoded = name.encode()
            entry = struct.pack("<QQII", place, place, len(encoded), 0) + encoded
            entry += b"\0" * (-len(entry) % 8)
            if len(listed) + len(entry) > size:
                break
            listed += entry
        return listed

    def _statistics(self, node, body):
        disk = os.statvfs(self._paths[1])
        counts = disk.f_blocks, disk.f_bfree, disk.f_bavail, disk.f_files, disk.f_ffree
        return struct.pack("<5Q4I24x", *counts, disk.f_bsize, disk.f_namemax, disk.f_frsize, 0)


def listen(disk):
    for line in sys.stdin:
        with disk.healthy:
            disk.fault = line.strip()
            if disk.fault.startswith("E"):
                disk.err(*disk.fault.split())
            disk.healthy.notify_all()
        print(disk.fault, flush=True)
    os._exit(0)


def serve(disk, fd):
    while True:
        request = os.read(fd, BUFFER_BYTES)
        _, opcode, unique, node, *_ = HEADER.unpack_from(request)
        if opcode in NO_REPLY:
            continue
        error, answer = disk.answer(opcode, node, request[HEADER.size :])
        try:
            os.write(fd, struct.pack("<IiQ", 16 + len(answer), -error, unique) + answer)
        except FileNotFoundError:
            continue  # Whoever asked was interrupted.


def main(arguments):
    folder, mountpoint = arguments
    fd = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={fd},rootmode=40000,user_id={os.getuid()},group_id={os.getgid()}"
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"faulty", os.fsencode(mountpoint), b"fuse", 0, options.encode()):
        sys.exit(f"cannot mount: {os.strerror(ctypes.get_errno())}")
    disk = Disk(folder)
    threading.Thread(target=listen, args=(disk,), daemon=True).start()
    print("ready", flush=True)
    serve(disk, fd)


main(sys.argv[1:])
