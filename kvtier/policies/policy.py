"""The eviction policy: the contract (which resident key goes next), and policies by name.

A policy is pure and synchronous, without clock or I/O. Keys come in prefix order, head first, and a policy takes them
tail first, so that a prefix outlives its continuation. Policies run on an engine's scheduler thread, between two steps:
every method costs a fraction of a microsecond a key.

A name is built in, an installed distribution's, or written out as `module:Class`.
"""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Generic, Protocol, TypeGuard, TypeVar

from kvtier.errors import ConfigError
from kvtier.settings import find_class, known_names
from kvtier.settings.hints import Hint

K = TypeVar("K", bound=Hashable)

ENTRY_POINT_GROUP = "kvtier.policies"

_BUILT_IN = {
    "arc": "kvtier.policies.plain:ARC",
    "density": "kvtier.policies.density:Density",
    "fifo": "kvtier.policies.plain:FIFO",
    "lru": "kvtier.policies.plain:LRU",
    "s3fifo": "kvtier.policies.plain:S3FIFO",
}


class Policy(ABC, Generic[K]):
    """Order among the resident keys of one cache of at most `capacity` keys.

    The owner decides which keys are resident. It makes room before it inserts. It never inserts a resident key, and
    never touches, ranks or removes an absent one. No batch names a key twice. The same calls give the same victims.
    """

    learns_hints: bool = False
    """True if `rank` heeds its hint. For other policies, the owner demotes the keys of a session that is over."""

    @abstractmethod
    def __init__(self, capacity: int) -> None:
        """Start empty. `capacity` (at least 1): the most keys that will ever be resident at once."""

    @abstractmethod
    def insert(self, keys: Sequence[K]) -> None:
        """Make the keys resident, tail first."""

    @abstractmethod
    def touch(self, keys: Sequence[K]) -> None:
        """Count one access to each of these resident keys, tail first."""

    @abstractmethod
    def rank(self, keys: Sequence[K], hint: Hint | None = None) -> None:
        """Renew the recency of these resident keys, tail first, without counting an access.

        Called when a request ends, with all its keys, so that pieces that came at different steps end in prefix
        order. A policy that does not order by recency ignores it. `hint`: what was said of the request's future; only
        a policy that `learns_hints` is given one.
        """

    @abstractmethod
    def evict(self, count: int, keep: Callable[[K], bool], incoming: Sequence[K] = ()) -> list[K] | None:
        """Choose `count` resident keys for which `keep` is false, forget and return them; None if there are fewer.

        None changes nothing, and costs a look at every resident key. An owner that counts its kept keys need not ask.

        `keep` is called at most a few times for a key, coldest first. A kept key costs one look a call, not one
        a victim. A policy may take a kept key at the cold end for one in use, and renew it. Then a row that is pinned
        for long is not passed over again in every call.

        `incoming`: the keys that need the room. They are inserted next if this succeeds. A policy with ghosts adapts
        to them.
        """

    @abstractmethod
    def remove(self, keys: Sequence[K]) -> None:
        """Forget these resident keys for a reason other than room: a failed store, a reset. They leave no ghosts."""


class Order(Protocol[K]):
    """The calls of a policy, whatever the owner's keys are."""

    learns_hints: bool

    def insert(self, keys: Sequence[K], /) -> None: ...
    def touch(self, keys: Sequence[K], /) -> None: ...
    def rank(self, keys: Sequence[K], hint: Hint | None = None, /) -> None: ...
    def remove(self, keys: Sequence[K], /) -> None: ...
    def evict(self, count: int, keep: Callable[[K], Any], incoming: Sequence[Any] = (), /) -> list[K] | None: ...


def known_policies() -> tuple[str, ...]:
    """Return the names of all policies, sorted: built-in ones and those of installed distributions."""
    return known_names(_BUILT_IN, ENTRY_POINT_GROUP)


def policy_class(name: str) -> type[Policy[Any]]:
    """Return the class of a policy: a built-in name (always the built-in policy), an entry point's, or `module:Class`.

    Raises `ConfigError` if it does not exist, is not installed, or is no complete `Policy`.
    """
    found = find_class("policy", name, _BUILT_IN, ENTRY_POINT_GROUP)
    if not _is_policy(found):
        raise ConfigError(f"policy {name!r}: {found!r} is no subclass of kvtier.policies.Policy")
    if inspect.isabstract(found):
        lacking = ", ".join(sorted(found.__abstractmethods__))
        raise ConfigError(f"policy {name!r}: {found.__name__} does not implement {lacking}")
    return found


def require_policy(name: str) -> None:
    """Reject an unknown policy of the option `eviction_policy`: the `ConfigError` begins with the option's name."""
    try:
        policy_class(name)
    except ConfigError as error:
        raise ConfigError(f"eviction_policy: {error}") from error


def _is_policy(found: object) -> TypeGuard[type[Policy[Any]]]:
    return isinstance(found, type) and issubclass(found, Policy)
