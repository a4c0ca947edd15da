"""Policies by name: built in, named by an installed distribution, or written out as `module:Class`."""

import inspect
from typing import Any, TypeGuard

from kvtier.errors import ConfigError
from kvtier.policies.base import Policy
from kvtier.settings import find_class, known_names

ENTRY_POINT_GROUP = "kvtier.policies"

_BUILT_IN = {
    "arc": "kvtier.policies.arc:ARC",
    "fifo": "kvtier.policies.fifo:FIFO",
    "lfu": "kvtier.policies.lfu:LFU",
    "lru": "kvtier.policies.lru:LRU",
    "s3fifo": "kvtier.policies.s3fifo:S3FIFO",
}


def known_policies() -> tuple[str, ...]:
    """Return the names of all policies, sorted: the built-in ones and those that distributions bring."""
    return known_names(_BUILT_IN, ENTRY_POINT_GROUP)


def policy_class(name: str) -> type[Policy[Any]]:
    """Return the class of a policy: a built-in name, an entry point's, or `module:Class`.

    A built-in name always means the built-in policy. Raises `ConfigError` if there is no such policy, if its module or
    what that needs is not installed, and if it is no complete `Policy`.
    """
    found = find_class("policy", name, _BUILT_IN, ENTRY_POINT_GROUP)
    if not _is_policy(found):
        raise ConfigError(f"policy {name!r}: {found!r} is no subclass of kvtier.policies.base.Policy")
    if inspect.isabstract(found):
        lacking = ", ".join(sorted(found.__abstractmethods__))
        raise ConfigError(f"policy {name!r}: {found.__name__} does not implement {lacking}")
    return found


def _is_policy(found: object) -> TypeGuard[type[Policy[Any]]]:
    return isinstance(found, type) and issubclass(found, Policy)
