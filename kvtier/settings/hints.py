"""Hints: what an application tells of a request's future; and advice, the form in which eviction orders get hints.

A hint is soft. It may be wrong, late or malformed, and no request ever fails for it. An unreadable hint is ignored and
counted, and the first of each kind is logged. The same struct serves both faces, traces, and vLLM's
`kv_transfer_params` (under "kvtier").
"""

import logging
import math
from collections.abc import Iterable, Sequence
from reprlib import Repr
from types import NoneType
from typing import Annotated, Generic, Literal, TypeVar

import msgspec
from msgspec.structs import force_setattr

from kvtier.errors import Remedy
from kvtier.settings.fields import is_table

PRIORITY_MAX = 99
RETAIN_S_MAX = 86_400.0  # Longer times are cut to this: no chunk is kept forever.
CLASS_CHARACTERS_MAX = 256
TIERS_NAMED_MAX = 64
SHOWN_CHARACTERS_MAX = 120  # A value in a message.
SAID_CHARACTERS_MAX = 64  # A client's name in the log.

K = TypeVar("K")
L = TypeVar("L")

Seconds = Annotated[float, msgspec.Meta(ge=0)]

logger = logging.getLogger(__name__)


class Hint(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A hint of an application about a request, given when the request begins or ends.

    A value of a wrong type raises a TypeError that names the field. A value out of range is ignored and counted when
    the hint is used.
    """

    over: bool = False  # The session will not come back.
    returns_in_s: Seconds | None = None  # The session is expected back this long after the request's end.
    retain_s: Seconds | None = None  # The chunks are passed over for this long when room is made.
    priority: Annotated[int, msgspec.Meta(ge=0, le=PRIORITY_MAX)] = 0  # Retained chunks of the lowest one go first.
    tokens: Annotated[int, msgspec.Meta(ge=0)] | None = None  # Length of the leading part to retain; None for all.
    class_: Annotated[str, msgspec.Meta(max_length=CLASS_CHARACTERS_MAX)] | None = msgspec.field(
        default=None, name="class"
    )
    """The sender, such as an agent, a tool or a tenant. A policy learns what each class is worth."""
    no_store: bool | Annotated[tuple[str, ...], msgspec.Meta(max_length=TIERS_NAMED_MAX)] = False
    """No chunk of the request is stored in a tier, or in the named tiers."""

    def __post_init__(self) -> None:
        for attribute, (types, _) in _TYPES.items():
            value = getattr(self, attribute)
            if type(value) not in types:
                force_setattr(self, attribute, _plain(attribute, value, types))
        if not isinstance(self.no_store, bool) and not _all_text(self.no_store):
            raise TypeError(_refusal("no_store", self.no_store))

    def keeps_out(self, tier: str) -> bool:
        """Return True if the request's chunks are not stored in the tier of this name."""
        return self.no_store if isinstance(self.no_store, bool) else tier in self.no_store


class Advice(msgspec.Struct, Generic[K], frozen=True):
    """Advice to an eviction order about keys, in prefix order. It is soft, and applied from memory.

    - `rank` renews the keys' recency. With a `hint`, which may be empty, a request that used exactly these keys has
      ended. Without one, the keys may be of several requests.
    - `demote` puts the keys before all others, tail first, until they are used again.
    - `retain` passes over the keys for `seconds`. A higher `priority` (0 to 99) takes the place of a lower one.
    """

    kind: Literal["rank", "demote", "retain"]
    keys: Sequence[K]
    hint: Hint | None = None
    seconds: float = 0.0
    priority: int = 0

    @property
    def is_hint(self) -> bool:
        """Return False if it only renews recency. An order that tracks hints starts with the first one."""
        return self.kind != "rank" or self.hint is not None

    def of(self, keys: Sequence[L]) -> "Advice[L]":
        """Return the same advice about other keys, such as the slots that hold these."""
        return Advice(self.kind, keys, self.hint, self.seconds, self.priority)


class IgnoredHints:
    """Counts of ignored hints by reason: `type` (no table), `field` (unknown), `value` (out of range), `tier`."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}

    def add(self, reason: str, what: str) -> None:
        """Count an ignored hint, or part of one, and log the first of each reason."""
        if reason not in self.counts:
            logger.warning(
                "a hint is ignored (%s): %s; later ones of this kind are only counted; see %s",
                reason,
                what,
                Remedy.HINT,
            )
        self.counts[reason] = self.counts.get(reason, 0) + 1


def hint_of(given: object, ignored: IgnoredHints | None = None) -> Hint | None:
    """Return the hint in a `Hint`, a table, or None. An unreadable one is None, and counted in `ignored`."""
    if given is None:
        return None
    try:
        return _read(given)
    except _UnreadableError as error:
        reason, what = error.args
    except Exception as error:  # noqa: BLE001  # Whatever a client sends costs only its hint.
        reason, what = "value", str(error)[:CLASS_CHARACTERS_MAX]
    if ignored is not None:
        ignored.add(reason, what)
    return None


def shown(value: object) -> str:
    """Return a value and its type for a message: escaped, on one line, at most `SHOWN_CHARACTERS_MAX` of the value."""
    return f"{_short.repr(value)[:SHOWN_CHARACTERS_MAX]} ({type(value).__name__})"


def shortened(name: str) -> str:
    """Return a client's name for the log: quoted and escaped, at most `SAID_CHARACTERS_MAX` of it."""
    return repr(name if len(name) <= SAID_CHARACTERS_MAX else f"{name[:SAID_CHARACTERS_MAX]}…")


class _UnreadableError(Exception):
    """The reason of `IgnoredHints.add`, and the message."""


def _read(given: object) -> Hint:
    sent: object = msgspec.to_builtins(given) if isinstance(given, Hint) else given
    if not is_table(sent):
        raise _UnreadableError("type", f"{type(given).__name__} given, a table of a hint's fields accepted")
    if len(sent) > len(_FIELDS):  # A million of them would take a step's time.
        raise _UnreadableError("field", f"{len(sent):,} fields given, {_ACCEPTED} accepted")
    table = dict(sent)
    if unknown := table.keys() - _FIELDS:
        raise _UnreadableError("field", f"{shortened(min(map(str, unknown)))} given, {_ACCEPTED} accepted")
    try:
        hint = msgspec.convert(table, Hint)
    except msgspec.ValidationError:
        raise _UnreadableError("value", next(filter(None, map(_wrong, table.items())))) from None
    for name, seconds in (("returns_in_s", hint.returns_in_s), ("retain_s", hint.retain_s)):
        if seconds is not None and not math.isfinite(seconds):
            raise _UnreadableError("value", _refusal(name, seconds))
    _encoder.encode(hint)  # Raises if it cannot be sent to a tier: half a character, more than 64 bits.
    return hint


def _wrong(field: tuple[str, object]) -> str | None:
    """Return the message about a field, a name and a value; None if it is valid."""
    try:
        msgspec.convert(dict([field]), Hint)
    except msgspec.ValidationError:
        return _refusal(*field)
    return None


def _refusal(name: str, value: object) -> str:
    name = name.rstrip("_")
    _, accepted = _TYPES["class_" if name == "class" else name]
    return f"{name}: {shown(value)} given, {accepted} accepted"


def _all_text(values: Iterable[object]) -> bool:
    return all(isinstance(value, str) for value in values)


def _plain(attribute: str, value: object, types: Sequence[type]) -> object:
    """Return the plain value of a subclass, such as NumPy's float or an enum's text; TypeError for other types."""
    if isinstance(value, float) and float in types:
        return float(value)
    if isinstance(value, int) and int in types and not isinstance(value, bool):
        return int(value)
    if isinstance(value, str) and str in types:
        return str.__str__(value)
    raise TypeError(_refusal(attribute, value))


_short = Repr()
_short.maxstring = _short.maxother = SAID_CHARACTERS_MAX

_SECONDS = (float, int, NoneType), "a finite number of seconds, at least 0,"
_TYPES: dict[str, tuple[tuple[type, ...], str]] = {  # What each attribute takes, and the words for it.
    "over": ((bool,), "true or false"),
    "returns_in_s": _SECONDS,
    "retain_s": _SECONDS,
    "priority": ((int,), f"a whole number from 0 to {PRIORITY_MAX}"),
    "tokens": ((int, NoneType), "a whole number, at least 0,"),
    "class_": ((str, NoneType), f"text of at most {CLASS_CHARACTERS_MAX} characters"),
    "no_store": ((bool, tuple, list), f"true, false, or a list of at most {TIERS_NAMED_MAX} tiers' names,"),
}
_encoder = msgspec.msgpack.Encoder()
_FIELDS = frozenset(field.encode_name for field in msgspec.structs.fields(Hint))
_ACCEPTED = ", ".join(sorted(_FIELDS))
