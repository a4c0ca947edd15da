"""The decoder of configurations: structs from untyped input, strict, every mistake named by the path of its field.

Input is walked beside the struct's annotations, and msgspec converts the leaves: its messages would show secrets, lack
accepted values, and leave out the keys of dictionaries on the way.
"""

import difflib
import math
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import takewhile
from types import NoneType, UnionType
from typing import Annotated, Any, ClassVar, Literal, TypeGuard, TypeVar, Union, get_args, get_origin

import msgspec
from msgspec.structs import FieldInfo, force_setattr

from kvtier.errors import ConfigError, escaped
from kvtier.settings.units import Unit, parse_path, unit_of

DEPTH_MAX = 32  # Nested lists and tables; a tier's options need three.
KEY_CHARACTERS_MAX = 64  # In a field's name in a message.
SHOWN_CHARACTERS_MAX = 80  # Of a value in a message: enough to find it, on one line.
SHOWN_BITS_MAX = 256  # Longer integers are described: Python refuses to write out very long ones.

_BOUNDS = {
    "ge": "at least",
    "gt": "more than",
    "le": "at most",
    "lt": "less than",
    "multiple_of": "a multiple of",
    "min_length": "of length at least",
    "max_length": "of length at most",
    "pattern": "matching",
}
_KINDS = {str: "text", int: "an integer", float: "a number", bool: "true or false", NoneType: "nothing"}

S = TypeVar("S", bound=msgspec.Struct)
T = TypeVar("T")


class Checked(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A struct whose fields are checked however it is made: a constructor is as strict as a file.

    Rules between fields stand in `__post_init__`, after `super()`'s, and raise `ConfigError("<field>: …")`.
    """

    rest: ClassVar[str | None] = None
    """Name of the field, a dict, that takes unknown keys; None: an unknown key is a mistake."""

    facts: ClassVar[frozenset[str]] = frozenset()
    """Fields that a program sets. In a file or a mapping they do not exist, and neither does `rest`."""

    meant: ClassVar[Mapping[str, str]] = {}
    """Names that people write for fields, and what a message suggests instead."""

    @classmethod
    def known_rest(cls) -> Iterable[str]:
        """Return keys that `rest` may take, for suggestions in an error's message."""
        return ()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.__rich_repr__())})"

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        """Return the fields without secrets; of fields that others decode, such as a tier's options, only the names."""
        return [(field.name, self._shown(field)) for field in struct_fields(type(self)).values()]

    def _shown(self, field: FieldInfo) -> Any:
        value = getattr(self, field.name)
        if is_table(value):
            return sorted(value)
        return "<not shown>" if value is not None and is_secret(field.type) else value

    def __post_init__(self) -> None:
        for name, field in struct_fields(type(self)).items():
            given = getattr(self, field.name)
            value = _value(field.type, given, name)
            if value is not given:  # Read from text, or a list made a tuple.
                force_setattr(self, field.name, value)


class _UnknownFieldError(ConfigError):
    """An unknown key; `decode` adds a suggestion."""

    def __init__(self, path: str, key: str, known: Iterable[str], meant: str | None) -> None:
        super().__init__(f"{path}: no such field")
        self.path, self.key, self.known, self.meant = path, key, sorted(known), meant


def decode(
    cls: type[S],
    given: object,
    where: str = "",
    *,
    siblings: Iterable[str] = (),
    places: Callable[[], Iterable[str]] | None = None,
) -> S:
    """Make a `cls` of a mapping, strictly: unknown fields, wrong types and values out of range are refused.

    `where` is the path of the mapping itself, `""` for a whole configuration. `siblings` are valid keys of the same
    table that are decoded elsewhere. Messages name them. `places` returns the paths of all fields of the whole
    configuration, where `cls` is a part of it: a message says where a misplaced field belongs.

    Raises `ConfigError("<path>: <what was given>, <what is> accepted")`. No message shows a secret.
    """
    try:
        return _struct(cls, given, where, tuple(siblings))
    except _UnknownFieldError as error:
        raise ConfigError(_unknown(error, list(struct_paths(cls, where) if places is None else places()))) from None


def foreign(decode: Callable[[Any], T], text: str | bytes) -> T:
    """Decode text by another library. Raises only `ValueError`, also for text that is nested too deeply."""
    try:
        return decode(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def read_toml(text: str) -> dict[str, Any]:
    """Decode TOML. Raises only `ValueError`."""
    return foreign(tomllib.loads, text)


# The fields of a struct.


@cache
def struct_fields(cls: type[msgspec.Struct]) -> dict[str, FieldInfo]:
    """Return all fields of a struct, by the names that they have in a file."""
    return {field.encode_name: field for field in msgspec.structs.fields(cls)}


@cache
def option_fields(cls: type[msgspec.Struct]) -> dict[str, FieldInfo]:
    """Return the fields that a file may set."""
    facts = {*cls.facts, cls.rest} if issubclass(cls, Checked) else set[str | None]()
    return {name: field for name, field in struct_fields(cls).items() if field.name not in facts}


def struct_paths(cls: type[msgspec.Struct], where: str = "") -> Iterator[str]:
    """Yield the paths of all fields of a struct and of those in it, such as `secondary_tiers[].limits.deadline_s`."""
    for name, field in option_fields(cls).items():
        path, inner = _join(where, name), field.type
        yield path
        if get_origin(inner) in (tuple, list):
            path, inner = f"{path}[]", get_args(inner)[0]
        for member in _members(inner):
            if _is_struct(member):
                yield from struct_paths(member, path)
    if issubclass(cls, Checked):
        yield from (_join(where, name) for name in cls.known_rest())


def names_a_path(kind: Any) -> bool:
    """Return True if an annotation is `Path`, or a union with it."""
    return any(unit.parse is parse_path for unit in map(_unit, _members(kind)) if unit is not None)


def is_secret(kind: Any) -> bool:
    """Return True if an annotation is of a secret, or a union with it: no message shows a value of it."""
    return any(unit.hidden for unit in map(_unit, _members(kind)) if unit is not None)


def _members(kind: Any) -> Sequence[Any]:
    return get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)


def _bare(kind: Any) -> Any:
    return get_args(kind)[0] if get_origin(kind) is Annotated else kind


def _metas(kind: Any) -> list[msgspec.Meta]:
    metadata = get_args(kind)[1:] if get_origin(kind) is Annotated else ()
    return [meta for meta in metadata if isinstance(meta, msgspec.Meta)]


def _unit(kind: Any) -> Unit | None:
    return next(filter(None, map(unit_of, _metas(kind))), None)


def _is_struct(bare: Any) -> TypeGuard[type[msgspec.Struct]]:
    return isinstance(bare, type) and issubclass(bare, msgspec.Struct)


def is_table(given: object) -> TypeGuard[Mapping[Any, Any]]:
    return isinstance(given, Mapping)


def is_list(given: object) -> TypeGuard[Sequence[Any]]:
    return isinstance(given, list | tuple)


# The walk.


def _struct(cls: type[S], given: object, path: str, siblings: tuple[str, ...] = ()) -> S:
    if isinstance(given, cls):
        return given
    fields, table = option_fields(cls), _table(given, path)
    loose = {key: value for key, value in table.items() if key not in fields}
    rest = cls.rest if issubclass(cls, Checked) else None
    if loose and rest is None:
        key = next(iter(loose))
        raise _UnknownFieldError(_join(path, key), key, [*siblings, *fields], _meant(cls, key))
    for name, field in fields.items():
        if field.required and name not in table:
            raise ConfigError(_missing(cls, field, path, loose))
    values = {
        own.name: _value(own.type, table[name], _join(path, name)) for name, own in fields.items() if name in table
    }
    if loose and rest is not None:  # Written beside the fields, so that is where a message places them.
        values[rest] = _value(struct_fields(cls)[rest].type, loose, path)
    try:
        return cls(**values)
    except ConfigError as error:  # From `__post_init__`, which knows its fields' names but not their path.
        raise ConfigError(f"{path}.{error}" if path else str(error)) from error.__cause__
    except ValueError as error:  # From the `__post_init__` of a struct that is not ours.
        raise ConfigError(f"{path}: {error}" if path else str(error)) from error


def _value(kind: Any, given: Any, path: str) -> Any:
    """Return a value of the annotation `kind`. Raises `ConfigError` with its path."""
    bare, unit = _bare(kind), _unit(kind)
    members = [member for member in _members(bare) if member is not NoneType]
    if len(members) == 1 and len(_members(bare)) == 2:  # `X | None`: X's own message is the best one.
        return None if given is None else _value(members[0], given, path)
    if _is_struct(bare):
        return _struct(bare, given, path)
    if bare is Any:
        return _plain(given, path)
    if isinstance(given, str):
        _plain(given, path)
    try:
        value = unit.parse(given) if unit is not None and isinstance(given, str) else _elements(bare, given, path)
        return msgspec.convert(value, kind)
    except ValueError:  # Includes msgspec's ValidationError, which may show the value.
        raise ConfigError(_refusal(path, given, kind)) from None


def _elements(bare: Any, given: Any, path: str) -> Any:
    """Decode the elements of a list, a tuple or a dict one by one, so that a mistake in one has its own path."""
    origin, arguments = get_origin(bare), get_args(bare)
    if is_list(given) and (origin is list or (origin is tuple and arguments[1:] == (...,))):
        return [_value(arguments[0], element, f"{path}[{index}]") for index, element in enumerate(given)]
    if is_table(given) and origin is dict and arguments[0] is str:
        return {key: _value(arguments[1], value, _join(path, key)) for key, value in _table(given, path).items()}
    return given


def _plain(given: Any, path: str, depth: int = 0) -> Any:
    """Return a value of types that JSON and msgpack carry. It may be a secret, so messages tell only its kind."""
    if depth > DEPTH_MAX:
        raise ConfigError(f"{path}: nested too deeply; at most {DEPTH_MAX} lists and tables within each other accepted")
    if is_table(given):
        return {key: _plain(value, _join(path, key), depth + 1) for key, value in _table(given, path).items()}
    if is_list(given):
        return [_plain(element, f"{path}[{index}]", depth + 1) for index, element in enumerate(given)]
    if given is None or isinstance(given, bool):
        return given
    if isinstance(given, int) and not -(1 << 63) <= given < 1 << 64:
        raise ConfigError(
            f"{path}: an integer of {given.bit_length():,} bits given, an integer of at most 64 bits accepted"
        )
    if isinstance(given, float) and not math.isfinite(given):
        raise ConfigError(f"{path}: {shown(given)} given, a finite number accepted")
    if isinstance(given, str) and not given.isascii() and any("\ud800" <= letter <= "\udfff" for letter in given):
        raise ConfigError(f"{path}: text with lone surrogates given, text that UTF-8 can encode accepted")
    if not isinstance(given, int | float | str):
        raise ConfigError(f"{path}: {_sort_of(given)} given, text, a number, true, false, a list or a table accepted")
    return given


def _table(given: object, path: str) -> dict[str, Any]:
    if not is_table(given):
        raise ConfigError(f"{path + ': ' if path else ''}{shown(given)} given, a table of fields accepted")
    for key in given:
        if not isinstance(key, str):
            raise ConfigError(f"{_join(path, str(key))}: {shown(key)} given as a field's name, text accepted")
        _plain(key, _join(path, key))
    return dict(given)


def _join(path: str, key: str) -> str:
    shown_key = key if len(key) <= KEY_CHARACTERS_MAX else f"{key[:KEY_CHARACTERS_MAX]}…"
    return f"{path}.{shown_key}" if path else shown_key


# Messages.


def _missing(cls: type[msgspec.Struct], field: FieldInfo, path: str, others: Iterable[str]) -> str:
    name = field.encode_name
    close = [key for key in others if _meant(cls, key) == repr(name)] or difflib.get_close_matches(name, others, n=1)
    hint = f" (did you mean it by {close[0]!r}?)" if close else ""
    return f"{_join(path, name)}: missing, {_accepted(field.type)} required{hint}"


def _meant(cls: type[msgspec.Struct], key: str) -> str | None:
    """Return the suggestion for a key, from the struct or one of its bases."""
    bases = [base for base in cls.__mro__ if issubclass(base, Checked)]
    return next((base.meant[key] for base in bases if key in base.meant), None)


def _refusal(path: str, given: object, kind: Any) -> str:
    if is_secret(kind):
        accepted = " or ".join(unit.accepted for unit in map(_unit, _members(kind)) if unit is not None)
        return f"{path}: {_sort_of(given)} given, {accepted} accepted, not the secret itself"
    unit = _unit(kind)
    meant = unit.respelled(given) if unit is not None and isinstance(given, str) else None
    hint = f" (did you mean {meant!r}?)" if meant else ""
    return f"{path}: {shown(given)} given, {_accepted(kind)} accepted{hint}"


def _unknown(error: _UnknownFieldError, places: list[str]) -> str:
    """Return the message for an unknown field, with a field of another place, name or spelling as a suggestion."""
    key = error.key[:KEY_CHARACTERS_MAX]
    index = (re.findall(r"\[\d+\]", error.path) or ["[0]"])[-1]
    elsewhere = {place.replace("[]", index) for place in places if place.rpartition(".")[2] == key} - {error.path}
    nearest = max(sorted(elsewhere), key=lambda place: _levels_shared(place, error.path), default=None)
    leaves = [place.rpartition(".")[2] for place in places]
    close = difflib.get_close_matches(key, error.known, n=1) or difflib.get_close_matches(key, leaves, n=1)
    guess = error.meant or (quoted(nearest) if nearest else repr(close[0]) if close else None)
    hint = f"did you mean {guess}? " if guess else ""
    return f"{error}; {hint}Known here: {', '.join(error.known)}"


def _levels_shared(place: str, path: str) -> int:
    pairs = zip(place.split("."), path.split("."), strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _accepted(kind: Any) -> str:
    bare, unit = _bare(kind), _unit(kind)
    origin, arguments = get_origin(bare), get_args(bare)
    if unit is not None:
        words = unit.accepted
    elif len(_members(bare)) > 1:
        words = " or ".join(map(_accepted, arguments))
    elif origin is Literal:
        words = " or ".join(map(repr, arguments))
    elif _is_struct(bare) or origin is dict:
        words = "a table of fields"
    elif origin in (tuple, list):
        return f"a list{_bounds(kind)}, each element {_accepted(arguments[0])}"
    else:
        words = _KINDS.get(bare, getattr(bare, "__name__", str(bare)))
    return words + _bounds(kind)


def _bounds(kind: Any) -> str:
    found = [
        f"{word} {limit:,}" if isinstance(limit, int | float) else f"{word} {limit}"
        for meta in _metas(kind)
        for name, word in _BOUNDS.items()
        if (limit := getattr(meta, name)) is not None
    ]
    return f", {' and '.join(found)}" if found else ""


def shown(given: object) -> str:
    """Return a value in words: itself if it is short, otherwise its kind."""
    if is_table(given):
        return "a table"
    if is_list(given):
        return "a list"
    if isinstance(given, bool | NoneType):
        return {True: "true", False: "false", None: "nothing"}[given]
    if isinstance(given, int) and given.bit_length() > SHOWN_BITS_MAX:
        return f"an integer of {given.bit_length():,} bits"
    return quoted(given) if isinstance(given, str) else _cut(escaped(repr(given)))


def quoted(text: str) -> str:
    """Return text in quotes, escaped, cut, and without a user and a password."""
    return _cut(repr(without_login(text)))


def _cut(text: str) -> str:
    return text if len(text) <= SHOWN_CHARACTERS_MAX else f"{text[: SHOWN_CHARACTERS_MAX - 1]}…"


def without_login(text: str) -> str:
    """Return an address without what precedes its `@`, which may be a user and a password."""
    head, at, rest = text.rpartition("@")
    return f"…@{rest}" if at and ":" in head else text


def _sort_of(given: object) -> str:
    """Return the kind of a value in words, and nothing of the value."""
    if is_table(given) or is_list(given) or isinstance(given, bool | NoneType):
        return shown(given)
    if isinstance(given, str):
        return "text"
    return "a number" if isinstance(given, int | float) else f"a value of type {type(given).__name__}"
