"""Words for messages: what a field's annotation accepts, and what was given instead."""

from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeGuard, Union, get_args, get_origin

import msgspec

from kvtier.errors import escaped
from kvtier.settings.units import Unit, parse_path, secret_of, unit_of

SHOWN_CHARACTERS_MAX = 80  # Of a value in a message: enough to find it, on one line.
SHOWN_BITS_MAX = 256  # Longer integers are described: Python refuses to write out very long ones.


def unwrapped(kind: Any) -> tuple[Any, Unit | None]:
    """Return an annotation without its metadata, and its unit, if any."""
    if get_origin(kind) is not Annotated:
        return kind, None
    bare, *metadata = get_args(kind)
    units = [unit for meta in metadata if isinstance(meta, msgspec.Meta) and (unit := unit_of(meta)) is not None]
    return bare, units[-1] if units else None


def names_a_path(kind: Any) -> bool:
    """Return True if an annotation is `Path`, or a union with it."""
    bare, unit = unwrapped(kind)
    if unit is not None:
        return unit.parse is parse_path
    return get_origin(bare) in (Union, UnionType) and any(map(names_a_path, get_args(bare)))


def secret_in(kind: Any) -> str | None:
    """Return the words for what an annotation for a secret accepts; None if it may be shown."""
    bare, *metadata = get_args(kind) if get_origin(kind) is Annotated else (kind,)
    found = next((words for meta in metadata if isinstance(meta, msgspec.Meta) and (words := secret_of(meta))), None)
    if found is None and get_origin(bare) in (Union, UnionType):
        return next(filter(None, map(secret_in, get_args(bare))), None)
    return found


def structs_in(kind: Any) -> Iterator[tuple[type[msgspec.Struct], bool]]:
    """Yield the structs that an annotation takes, and whether each is an element of a list."""
    bare, _ = unwrapped(kind)
    if is_struct(bare):
        yield bare, False
    elif get_origin(bare) in (Union, UnionType):
        for member in get_args(bare):
            yield from structs_in(member)
    elif get_origin(bare) in (tuple, list):
        yield from ((inner, True) for inner, _ in structs_in(get_args(bare)[0]))


def is_struct(bare: Any) -> TypeGuard[type[msgspec.Struct]]:
    return isinstance(bare, type) and issubclass(bare, msgspec.Struct)


def is_table(given: object) -> TypeGuard[Mapping[Any, Any]]:
    return isinstance(given, Mapping)


def is_list(given: object) -> TypeGuard[Sequence[Any]]:
    return isinstance(given, list | tuple)


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
    if isinstance(given, str):
        return quoted(given)
    text = escaped(repr(given))
    return text if len(text) <= SHOWN_CHARACTERS_MAX else text[: SHOWN_CHARACTERS_MAX - 1] + "…"


def quoted(text: str) -> str:
    """Return text in quotes, escaped, cut, and without a user and a password."""
    text = repr(without_login(text))
    return text if len(text) <= SHOWN_CHARACTERS_MAX else text[: SHOWN_CHARACTERS_MAX - 1] + "…"


def without_login(text: str) -> str:
    """Return an address without what precedes its `@`, which may be a user and a password."""
    head, at, rest = text.rpartition("@")
    return f"…@{rest}" if at and ":" in head else text


def sort_of(given: object) -> str:
    """Return the kind of a value in words, and nothing of the value."""
    if is_table(given) or is_list(given) or isinstance(given, bool | NoneType):
        return shown(given)
    if isinstance(given, str):
        return "text"
    return "a number" if isinstance(given, int | float) else f"a value of type {type(given).__name__}"


def accepted(kind: Any) -> str:
    """Return the words for what an annotation accepts."""
    bare, unit = unwrapped(kind)
    origin, arguments = get_origin(bare), get_args(bare)
    if unit is not None:
        return f"{unit.accepted}{_bounds(kind)}"
    if origin in (Union, UnionType):
        return " or ".join(accepted(member) for member in arguments)
    if origin is Literal:
        return " or ".join(repr(choice) for choice in arguments)
    if is_struct(bare) or origin is dict:
        return "a table of fields"
    if origin in (tuple, list):
        return f"a list{_bounds(kind)}" + (f", each element {accepted(arguments[0])}" if arguments else "")
    if _is_enum(bare):
        return " or ".join(repr(member.value) for member in bare)
    names = {str: "text", int: "an integer", float: "a number", bool: "true or false", NoneType: "nothing"}
    return names.get(bare, getattr(bare, "__name__", str(bare))) + _bounds(kind)


def _bounds(kind: Any) -> str:
    """Return the bounds of an annotated number, text or list in words."""
    metas = [meta for meta in get_args(kind)[1:] if isinstance(meta, msgspec.Meta)]
    words = {
        "ge": "at least",
        "gt": "more than",
        "le": "at most",
        "lt": "less than",
        "multiple_of": "a multiple of",
        "min_length": "of length at least",
        "max_length": "of length at most",
        "pattern": "matching",
    }
    found = [
        f"{word} {limit:,}" if isinstance(limit, int | float) else f"{word} {limit}"
        for meta in metas
        for name, word in words.items()
        if (limit := getattr(meta, name)) is not None
    ]
    return f", {' and '.join(found)}" if found else ""


def _is_enum(bare: Any) -> TypeGuard[type[Enum]]:
    return isinstance(bare, type) and issubclass(bare, Enum)
