"""Services that hosts share, each as a tier's configuration, with what can become of it while engines serve.

A service is begun by its fixture on free ports of this machine, and ended by it. Time-outs are short where a test waits
for them, and long elsewhere: there they would only say that the machine is busy.
"""

import signal
import subprocess
import sys
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import pytest

from tests.mooncake.pools import Pool
from tests.object.servers import MotoServer
from tests.redis.servers import RedisServer

QUICK_S, PATIENT_S = 1.0, 60.0  # Time-outs.
LIMITS = {"breaker_failures": 2, "breaker_cooldown_s": 0.2, "answer_ttl_s": 0.2}


class Fault(NamedTuple):
    """What becomes of a service, and how it comes back."""

    strike: Callable[[], None]
    mend: Callable[[], None]


class Remote(ABC):
    """A service, and the tier that uses it: the same configuration on every host."""

    faults: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def options(self, timeout_s: float) -> Mapping[str, Any]:
        """Return the tier's own options, with its type."""

    def fault(self, name: str) -> Fault:
        """Return what happens, by its name: one of `faults`."""
        raise KeyError(name)

    def end(self) -> None:  # noqa: B027  # A folder needs none.
        """Stop the service."""

    def empty(self) -> None:
        """Take everything away that the service has, as somebody else would."""
        raise NotImplementedError

    def tier(self, *, quick: bool = False, **changes: Any) -> dict[str, Any]:
        timeout_s = QUICK_S if quick else PATIENT_S
        return {**self.options(timeout_s), "limits": {**LIMITS, "deadline_s": 2 * timeout_s}, **changes}


class Folder(Remote):
    """A directory that every host has mounted."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def options(self, timeout_s: float) -> Mapping[str, Any]:
        return {"type": "fs", "root": str(self._folder / "filer"), "shared": True, "locality": "REMOTE"}


class Redis(Remote):
    """A server that forgets everything when it ends."""

    faults = ("hangs", "is killed")

    def __init__(self, folder: Path) -> None:
        self._server = RedisServer(folder).start()

    def options(self, timeout_s: float) -> Mapping[str, Any]:
        return {"type": "redis", "url": f"redis://{self._server.address}", "timeout_s": timeout_s}

    def fault(self, name: str) -> Fault:
        signalled = self._server.signal
        return {
            "hangs": Fault(lambda: signalled(signal.SIGSTOP), lambda: signalled(signal.SIGCONT)),
            "is killed": Fault(self._server.kill, lambda: self._server.start() and None),
        }[name]

    def empty(self) -> None:
        self._server.ask("FLUSHALL")

    def end(self) -> None:
        self._server.kill()


class Mooncake(Remote):
    """A master that knows where chunks are, and an owner whose memory they are in."""

    faults = ("loses its owner", "has an owner that hangs", "loses its master")

    def __init__(self, folder: Path) -> None:
        loads = subprocess.run([sys.executable, "-c", "import mooncake.store"], capture_output=True, text=True)
        if loads.returncode:
            pytest.skip(f"Mooncake does not load here: {loads.stderr.splitlines()[-1]}")
        self._pool = Pool(folder, client_ttl_s=2)
        self._pool.add_owner()

    def options(self, timeout_s: float) -> Mapping[str, Any]:
        return {"type": "mooncake", "master": self._pool.address, "timeout_s": timeout_s}

    def fault(self, name: str) -> Fault:
        pool, owner = self._pool, self._pool.owners[-1]
        return {
            "loses its owner": Fault(owner.kill, lambda: pool.add_owner() and None),
            "has an owner that hangs": Fault(
                lambda: owner.signal(signal.SIGSTOP), lambda: owner.signal(signal.SIGCONT)
            ),
            "loses its master": Fault(pool.master.kill, lambda: pool.start_master() and None),
        }[name]

    def end(self) -> None:
        self._pool.close()


class Bucket(Remote):
    """A bucket of a server that speaks S3."""

    faults = ("hangs", "loses its bucket")
    bucket = "kvtier"

    def __init__(self, folder: Path) -> None:
        credentials = {name: uuid.uuid4().hex for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")}
        self._server = MotoServer(folder, credentials).start()
        self._server.client.create_bucket(Bucket=self.bucket)
        self._keys = folder / "credentials"
        self._keys.write_text(
            "\n".join(["[default]", *(f"{name.lower()} = {key}" for name, key in credentials.items())])
        )
        self._keys.chmod(0o600)

    def options(self, timeout_s: float) -> Mapping[str, Any]:
        return {
            "type": "object",
            "url": f"s3://{self.bucket}/kv",
            "endpoint": self._server.endpoint,
            "credentials_file": str(self._keys),
            "absent_ttl_s": 0.2,
            "timeout_s": timeout_s,
        }

    def fault(self, name: str) -> Fault:
        server = self._server
        return {
            "hangs": Fault(lambda: server.signal(signal.SIGSTOP), lambda: server.signal(signal.SIGCONT)),
            "loses its bucket": Fault(
                lambda: server.remove_bucket(self.bucket),
                lambda: server.client.create_bucket(Bucket=self.bucket) and None,
            ),
        }[name]

    def end(self) -> None:
        self._server.kill()


REMOTES: dict[str, type[Remote]] = {"fs": Folder, "redis": Redis, "mooncake": Mooncake, "object": Bucket}
"""The tiers that hosts can share, by type."""

FAULTS = [(name, fault) for name, remote in REMOTES.items() for fault in remote.faults]
