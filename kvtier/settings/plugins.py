"""Plug-ins: classes by name (built in, a distribution's, or `module:Class`), imported at their first use."""

import difflib
import importlib
from collections.abc import Mapping
from importlib.metadata import entry_points

from kvtier.errors import ConfigError
from kvtier.settings.fields import quoted


def known_names(built_in: Mapping[str, str], group: str) -> tuple[str, ...]:
    """Return the known names, sorted: the built-in ones and those of an entry-point group."""
    return tuple(sorted({*built_in, *entry_points(group=group).names}))


def find_class(
    kind: str, name: str, built_in: Mapping[str, str], group: str, meant: Mapping[str, str] | None = None
) -> object:
    """Return the object of a name: a key of `built_in` (its value is `module:Class`), an entry point, `module:Class`.

    A built-in name always means the built-in class. `kind` is its name in messages, e.g. "policy". `meant` has other
    names that people try, in small letters, and what messages suggest instead. Raises `ConfigError` if there is none,
    or if its module or a dependency is not installed. Any other error is a bug in the module, and passes through. The
    caller checks the class.
    """
    return _imported(kind, name, _target(kind, name, built_in, group, meant or {}))


def _target(kind: str, name: str, built_in: Mapping[str, str], group: str, meant: Mapping[str, str]) -> str:
    if name in built_in:
        return built_in[name]
    if ":" in name:
        return name
    points = entry_points(group=group, name=name)  # Old build tools append spaces and extras to `module:Class`.
    found = {"".join(point.value.partition("[")[0].split()): point for point in points}
    if not found:
        known = known_names(built_in, group)
        guess = meant.get(name.lower()) or next(map(repr, difflib.get_close_matches(name.lower(), known, n=1)), None)
        hint = f"did you mean {guess}? " if guess else ""
        raise ConfigError(f'{quoted(name)} is no {kind}; {hint}Known: {", ".join(known)}, or "module:Class"')
    if len(found) > 1:
        claims = ", ".join(
            sorted(
                f"{target} ({point.dist.name if point.dist else 'unknown distribution'})"
                for target, point in found.items()
            )
        )
        raise ConfigError(f"{kind} {name!r} is claimed by {claims}: write out the one that is meant")
    return next(iter(found))


def _imported(kind: str, name: str, target: str) -> object:
    module_name, _, qualified_name = target.partition(":")
    parts = [*module_name.split("."), *qualified_name.split(".")]
    if not all(part.isidentifier() for part in parts):
        raise ConfigError(f'{kind} {name!r} is not of the form "module:Class"')
    try:
        found: object = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if f"{module_name}.".startswith(f"{missing}."):
            raise ConfigError(f"{kind} {name!r}: there is no module {missing!r} to import") from error
        if missing.partition(".")[0] == parts[0]:  # The plug-in's own package lacks one of its modules: a bug.
            raise
        raise ConfigError(
            f"{kind} {name!r} needs the module {missing!r}, which is not installed: install what provides it"
        ) from error
    except ImportError as error:  # For example a dependency's shared library, or a version without a name.
        raise ConfigError(f"{kind} {name!r} cannot be imported: {error}") from error
    for part in qualified_name.split("."):
        if not hasattr(found, part):
            raise ConfigError(f"{kind} {name!r}: module {module_name!r} has no {qualified_name!r}")
        found = getattr(found, part)
    return found
