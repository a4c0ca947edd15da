"""Tier types by name: built in, named by an installed distribution, or written out as `module:Class`.

A backend is imported when it is first asked for, never with kvtier: what it needs may not be installed.
"""

import inspect
from typing import TypeGuard

import msgspec

from kvtier.backend.contract import Backend, Durability
from kvtier.errors import ConfigError
from kvtier.settings import find_class, known_names

ENTRY_POINT_GROUP = "kvtier.backends"

_BUILT_IN = {
    "dummy": "kvtier_backends.dummy:DummyBackend",
    "fs": "kvtier_backends.fs:FsBackend",
    "redis": "kvtier_backends.redis:RedisBackend",
}


def known_types() -> tuple[str, ...]:
    """Return the names of all tier types, sorted: the built-in ones and those that distributions bring."""
    return known_names(_BUILT_IN, ENTRY_POINT_GROUP)


def backend_class(type_name: str) -> type[Backend]:
    """Return the class of a tier type: a built-in name, an entry point's, or `module:Class`.

    A built-in name always means the built-in tier. Raises `ConfigError` if there is no such type, if its module or
    what that needs is not installed, and if the class is no complete `Backend`. Any other error comes out of the
    module as it was raised: it is a bug there.
    """
    return _checked(type_name, find_class("tier type", type_name, _BUILT_IN, ENTRY_POINT_GROUP))


def _checked(type_name: str, found: object) -> type[Backend]:
    """Return what was found if it is a whole backend."""
    if not _is_backend(found):
        raise ConfigError(f"tier type {type_name!r}: {found!r} is no subclass of kvtier.backend.Backend")
    if inspect.isabstract(found):
        lacking = ", ".join(sorted(found.__abstractmethods__))
        raise ConfigError(f"tier type {type_name!r}: {found.__name__} does not implement {lacking}")
    if not isinstance(getattr(found, "durability", None), Durability):
        raise ConfigError(f"tier type {type_name!r}: {found.__name__}.durability is no Durability")
    options = getattr(found, "options_type", None)
    if not (isinstance(options, type) and issubclass(options, msgspec.Struct)):
        raise ConfigError(f"tier type {type_name!r}: {found.__name__}.options_type is no msgspec.Struct")
    if not (options.__struct_config__.frozen and options.__struct_config__.forbid_unknown_fields):
        raise ConfigError(
            f"tier type {type_name!r}: {found.__name__}.options_type is not both frozen and closed to unknown fields"
        )
    return found


def _is_backend(found: object) -> TypeGuard[type[Backend]]:
    return isinstance(found, type) and issubclass(found, Backend)
