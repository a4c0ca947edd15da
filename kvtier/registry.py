"""Tier types by name: built in, named by an installed distribution, or written out as `module:Class`.

A backend is imported when it is first asked for, never with kvtier: what it needs may not be installed.
"""

import difflib
import importlib
import inspect
from importlib.metadata import EntryPoint, entry_points

import msgspec

from kvtier.backend import Backend, Durability
from kvtier.errors import ConfigError

ENTRY_POINT_GROUP = "kvtier.backends"

_BUILT_IN = {
    "dummy": "kvtier_backends.dummy:DummyBackend",
    "fs": "kvtier_backends.fs:FsBackend",
}


def known_types() -> tuple[str, ...]:
    """Return the names of all tier types, sorted: the built-in ones and those that distributions bring."""
    return tuple(sorted({*_BUILT_IN, *entry_points(group=ENTRY_POINT_GROUP).names}))


def backend_class(type_name: str) -> type[Backend]:
    """Return the class of a tier type: a built-in name, an entry point's, or `module:Class`.

    A built-in name always means the built-in tier. Raises `ConfigError` if there is no such type, if its module or
    what that needs is not installed, and if the class is no complete `Backend`. Any other error comes out of the
    module as it was raised: it is a bug there.
    """
    return _checked(type_name, _imported(type_name, _target(type_name)))


def _target(type_name: str) -> str:
    """Return where a type's class is, as `module:Class`."""
    if type_name in _BUILT_IN:
        return _BUILT_IN[type_name]
    if ":" in type_name:
        return type_name
    found = {_class_of(point): point for point in entry_points(group=ENTRY_POINT_GROUP, name=type_name)}
    if not found:
        known = known_types()
        close = difflib.get_close_matches(type_name, known, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise ConfigError(f'{type_name!r} is no tier type; {hint}Known: {", ".join(known)}, or "module:Class"')
    if len(found) > 1:
        claims = ", ".join(sorted(f"{target} ({_distribution(point)})" for target, point in found.items()))
        raise ConfigError(f"tier type {type_name!r} is claimed by {claims}: write out the one that is meant")
    return next(iter(found))


def _class_of(point: EntryPoint) -> str:
    """Return an entry point's `module:Class`, without spaces and the extras that old build tools append."""
    return "".join(point.value.partition("[")[0].split())


def _distribution(point: EntryPoint) -> str:
    return point.dist.name if point.dist is not None else "unknown distribution"


def _imported(type_name: str, target: str) -> object:
    module_name, _, qualified_name = target.partition(":")
    names = [*module_name.split("."), *qualified_name.split(".")]
    if not all(name.isidentifier() for name in names):
        raise ConfigError(f'tier type {type_name!r} is not of the form "module:Class"')
    try:
        found: object = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if f"{module_name}.".startswith(f"{missing}."):
            raise ConfigError(f"tier type {type_name!r}: there is no module {missing!r} to import") from error
        if missing.partition(".")[0] == names[0]:  # The backend's own package lacks one of its modules: a bug.
            raise
        raise ConfigError(
            f"tier type {type_name!r} needs the module {missing!r}, which is not installed: install what provides it"
        ) from error
    except ImportError as error:  # For example a dependency's shared library, or a version without a name.
        raise ConfigError(f"tier type {type_name!r} cannot be imported: {error}") from error
    for name in qualified_name.split("."):
        if not hasattr(found, name):
            raise ConfigError(f"tier type {type_name!r}: module {module_name!r} has no {qualified_name!r}")
        found = getattr(found, name)
    return found


def _checked(type_name: str, found: object) -> type[Backend]:
    """Return what was found if it is a whole backend."""
    if not (isinstance(found, type) and issubclass(found, Backend)):
        raise ConfigError(f"tier type {type_name!r}: {found!r} is no subclass of kvtier.backend.Backend")
    if inspect.isabstract(found):
        lacking = ", ".join(sorted(found.__abstractmethods__))
        raise ConfigError(f"tier type {type_name!r}: {found.__name__} does not implement {lacking}")
    if not isinstance(getattr(found, "durability", None), Durability):
        raise ConfigError(f"tier type {type_name!r}: {found.__name__}.durability is no Durability")
    options = getattr(found, "Options", None)
    if not (isinstance(options, type) and issubclass(options, msgspec.Struct)):
        raise ConfigError(f"tier type {type_name!r}: {found.__name__}.Options is no msgspec.Struct")
    if not (options.__struct_config__.frozen and options.__struct_config__.forbid_unknown_fields):
        raise ConfigError(
            f"tier type {type_name!r}: {found.__name__}.Options is not both frozen and closed to unknown fields"
        )
    return found
