"""Services that hosts share, each as a tier's configuration, with what can become of it while engines serve.

A service is begun by its fixture on free ports of this machine, and ended by it. Time-outs are short where a test waits
for them, and long elsewhere: there they would only say that the machine is busy.
"""

import signal
import subprocess
import sys
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import pytest

from tests.mooncake.pools import Pool
from tests.object.servers import MotoServer
from tests.redis.servers import RedisServer

QUICK_S, PATIENT_S = 2.0, 60.0  # Time-outs.
LIMITS = {"breaker_failures": 2, "breaker_cooldown_s": 0.2, "answer_ttl_s": 0.2}


class Remote(ABC):
    """A service, and the tier that uses it: the same configuration on every host."""

    @abstractmethod
    def options(self, timeout_s):
        """Return the tier's own options, with its type."""

    def end(self):  # noqa: B027  # A folder needs none.
        """Stop the service."""

    def empty(self):
        """Take everything away that the service has, as somebody else would."""
        raise NotImplementedError

    def tier(self, *, quick=False, **changes):
        timeout_s = QUICK_S if quick else PATIENT_S
        return {**self.options(timeout_s), "limits": {**LIMITS, "deadline_s": 2 * timeout_s}, **changes}


class Folder(Remote):
    """A directory that every host has mounted."""

    def __init__(self, folder):
        self._folder = folder

    def options(self, timeout_s):
        return {"type": "fs", "root": str(self._folder / "filer"), "shared": True, "locality": "REMOTE"}


class Redis(Remote):
    """A server that forgets everything when it ends."""

    def __init__(self, folder):
        self.server = RedisServer(folder).start()

    def options(self, timeout_s):
        return {"type": "redis", "url": f"redis://{self.server.address}", "timeout_s": timeout_s}

    def empty(self):
        self.server.ask("FLUSHALL")

    def end(self):
        self.server.kill()


class Mooncake(Remote):
    """A master that knows where chunks are, and an owner whose memory they are in."""

    def __init__(self, folder):
        loads = subprocess.run([sys.executable, "-c", "import mooncake.store"], capture_output=True, text=True)
        if loads.returncode:
            pytest.skip(f"Mooncake does not load here: {loads.stderr.splitlines()[-1]}")
        self.pool = Pool(folder, client_ttl_s=2)
        self.pool.add_owner()

    def options(self, timeout_s):
        return {"type": "mooncake", "master": self.pool.address, "timeout_s": timeout_s}

    @property
    def owner(self):
        return self.pool.owners[-1]

    def end(self):
        self.pool.close()


class Bucket(Remote):
    """A bucket of a server that speaks S3."""

    bucket = "kvtier"

    def __init__(self, folder):
        credentials = {name: uuid.uuid4().hex for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")}
        self.server = MotoServer(folder, credentials).start()
        self.server.client.create_bucket(Bucket=self.bucket)
        self._keys = folder / "credentials"
        self._keys.write_text(
            "\n".join(["[default]", *(f"{name.lower()} = {key}" for name, key in credentials.items())])
        )
        self._keys.chmod(0o600)

    def options(self, timeout_s):
        return {
            "type": "object",
            "url": f"s3://{self.bucket}/kv",
            "endpoint": self.server.endpoint,
            "credentials_file": str(self._keys),
            "absent_ttl_s": 0.2,
            "timeout_s": timeout_s,
        }

    def end(self):
        self.server.kill()


REMOTES: dict[str, type[Remote]] = {"fs": Folder, "redis": Redis, "mooncake": Mooncake, "object": Bucket}
"""The tiers that hosts can share, by type."""

Step = Callable[[Any], object]


def hangs(process_of):
    """Stop a process of a service, and let it go on."""
    return (
        lambda remote: process_of(remote).signal(signal.SIGSTOP),
        lambda remote: process_of(remote).signal(signal.SIGCONT),
    )


FAULTS: dict[tuple[str, str], tuple[Step, Step]] = {
    ("redis", "hangs"): hangs(lambda remote: remote.server),
    ("redis", "is killed"): (lambda remote: remote.server.kill(), lambda remote: remote.server.start()),
    ("mooncake", "loses its owner"): (lambda remote: remote.owner.kill(), lambda remote: remote.pool.add_owner()),
    ("mooncake", "has an owner that hangs"): hangs(lambda remote: remote.owner),
    ("mooncake", "loses its master"): (
        lambda remote: remote.pool.master.kill(),
        lambda remote: remote.pool.start_master(),
    ),
    ("object", "hangs"): hangs(lambda remote: remote.server),
    ("object", "loses its bucket"): (
        lambda remote: remote.server.remove_bucket(remote.bucket),
        lambda remote: remote.server.client.create_bucket(Bucket=remote.bucket),
    ),
}
"""What becomes of a service, and how it comes back."""
