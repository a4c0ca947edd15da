"""Words for messages: what a field's annotation accepts, and what was given instead."""

from collections.abc import Mapping, Sequence
from enum import Enum
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeGuard, Union, get_args, get_origin

import msgspec

from kvtier.settings.units import Unit, parse_path, unit_of

SHOWN_CHARACTERS_MAX = 80  # Of a given value in a message: enough to find it, and it stays on the line.
SHOWN_BITS_MAX = 256  # Longer integers are described: Python refuses to write out very long ones.


def unwrapped(kind: Any) -> tuple[Any, Unit | None]:
    """Take the annotation's metadata off, and return the unit that it names, if any."""
    if get_origin(kind) is not Annotated:
        return kind, None
    bare, *metadata = get_args(kind)
    units = [unit for meta in metadata if isinstance(meta, msgspec.Meta) and (unit := unit_of(meta)) is not None]
    return bare, units[-1] if units else None


def names_a_path(kind: Any) -> bool:
    """Say whether an annotation is `Path`, or takes it among others."""
    bare, unit = unwrapped(kind)
    if unit is not None:
        return unit.parse is parse_path
    return get_origin(bare) in (Union, UnionType) and any(map(names_a_path, get_args(bare)))


def is_struct(bare: Any) -> TypeGuard[type[msgspec.Struct]]:
    return isinstance(bare, type) and issubclass(bare, msgspec.Struct)


def is_table(given: object) -> TypeGuard[Mapping[Any, Any]]:
    return isinstance(given, Mapping)


def is_list(given: object) -> TypeGuard[Sequence[Any]]:
    return isinstance(given, list | tuple)


def shown(given: object) -> str:
    """Say in words what was given: itself if it is short, what it is if not."""
    if is_table(given):
        return "a table"
    if is_list(given):
        return "a list"
    if isinstance(given, bool | NoneType):
        return {True: "true", False: "false", None: "nothing"}[given]
    if isinstance(given, int) and given.bit_length() > SHOWN_BITS_MAX:
        return f"an integer of {given.bit_length():,} bits"
    text = repr(given)
    return text if len(text) <= SHOWN_CHARACTERS_MAX else text[: SHOWN_CHARACTERS_MAX - 1] + "…"


def accepted(kind: Any) -> str:
    """Say in words what an annotation takes."""
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
    """Say between which limits an annotated number, text or list must lie."""
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
