"""Services that hosts share, each as a tier's configuration, with what can become of it while engines serve.

Time-outs are short where a test waits for them, and long elsewhere: there they would only say that the machine is busy.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

from tests.remote.mooncake import MooncakeRemote
from tests.remote.object import ObjectRemote
from tests.remote.outcomes import Fault
from tests.remote.redis import RedisRemote
from tests.remote.remotes import Remote, ServerRemote
from tests.remote.shared_fs import SharedFsRemote

QUICK_S, PATIENT_S = 2.0, 60.0  # Time-outs.
LIMITS = {"breaker_failures": 2, "breaker_cooldown_s": 0.2, "answer_ttl_s": 0.2}
REMOTES: dict[str, type[Remote]] = {
    remote.name: remote for remote in (SharedFsRemote, RedisRemote, MooncakeRemote, ObjectRemote)
}
"""The tiers that hosts can share, by type."""


def tier_of(remote, *, quick=False, **changes):
    timeout_s = QUICK_S if quick else PATIENT_S
    times = {} if remote.name == "fs" else {"timeout_s": timeout_s}
    limits = {**LIMITS, "deadline_s": 2 * timeout_s}
    return {**remote.tier(), **remote.forgets_absences, **times, "limits": limits, **changes}


@contextmanager
def without_its_master(remote):
    remote.pool.master.kill()
    try:
        yield
    finally:
        remote.pool.start_master()


@contextmanager
def without_its_bucket(remote):
    remote.server.remove_bucket(remote.bucket)
    try:
        yield
    finally:
        remote.server.client.create_bucket(Bucket=remote.bucket)


HANGS, IS_KILLED = (partial(ServerRemote.suffers, fault=fault, numbers=()) for fault in (Fault.HUNG, Fault.KILLED))
FAULTS: dict[tuple[str, str], Callable[[Any], AbstractContextManager[None]]] = {
    ("redis", "hangs"): HANGS,
    ("redis", "is killed"): IS_KILLED,
    ("mooncake", "loses its owner"): IS_KILLED,
    ("mooncake", "has an owner that hangs"): HANGS,
    ("mooncake", "loses its master"): without_its_master,
    ("object", "hangs"): HANGS,
    ("object", "loses its bucket"): without_its_bucket,
}
"""Faults of a service: each lasts as long as its context."""
