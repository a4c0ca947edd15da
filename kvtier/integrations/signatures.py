"""The LLM engine that is installed, compared with what kvtier uses of it.

An engine's interface changes with its releases, and a call that differs would fail in a step. kvtier's own classes say
which methods the engine calls, and with which parameters; two tables say what kvtier gives and reads.
"""

import inspect
import logging
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from inspect import Parameter
from operator import attrgetter

from kvtier.errors import ConfigError, Remedy


@dataclass(frozen=True, eq=False)
class Used:
    """The names and parameters of an LLM engine that kvtier uses, by place: module of its package, colon, name."""

    engine: str
    version: str  # Installed.
    tried: Sequence[str]  # Versions, each with as many numbers as matter.
    given: Mapping[str, str]  # Parameters that kvtier gives, in their order; the engine may have others with defaults.
    read: Mapping[str, str]  # Fields that kvtier reads.
    may_lack: Collection[str] = ()  # Methods of kvtier's classes that not every tried version has.

    @contextmanager
    def imported(self) -> Generator[None]:
        """Refuse the engine if the imports within fail by a name of its, or by a parameter."""
        try:
            yield
        except (ImportError, AttributeError, LookupError, TypeError) as error:
            raise self.refusal(error) from error

    def require(self, ours: Sequence[type]) -> None:
        """Raise `ConfigError` if the engine differs from what these classes override, or from the tables."""
        if difference := next(self.differences(ours), None):
            raise self.refusal(difference)

    def refusal(self, difference: object) -> ConfigError:
        return ConfigError(
            f"kvtier does not fit {self.engine} {self.version}: {difference}; install {self.engine}"
            f" {' or '.join(self.tried)}, or a kvtier that knows this one"
        )

    def differences(self, ours: Sequence[type]) -> Iterator[str]:
        """Yield the names of the engine's that differ."""
        package = self.engine.lower()
        for each in ours:
            base = next(above for above in each.__mro__ if above.__module__.startswith(f"{package}."))
            yield from (f"{base.__name__}.{name} is new" for name in sorted(getattr(each, "__abstractmethods__", ())))
            for name in [name for name in vars(each) if not name.startswith("_") and callable(getattr(each, name))]:
                theirs, mine = getattr(base, name, None), _parameters(getattr(each, name))
                known = [one for one in mine if mine[one].kind is Parameter.POSITIONAL_OR_KEYWORD]
                if theirs is not None:
                    has = _parameters(theirs)
                    needed = _without_default(mine) & {*known}
                    bound = has.keys() if len(known) == len(mine) else ()  # With `*given`, any further ones.
                    yield from _compared(f"{base.__name__}.{name}", has, known, needed, bound)
                elif name not in self.may_lack:
                    yield f"{base.__name__}.{name} is missing"
        for place, names in [*self.given.items(), *self.read.items()]:
            module, _, path = place.partition(":")
            try:
                has = _parameters(attrgetter(path)(import_module(f"{package}.{module}")))
            except (ImportError, AttributeError):
                yield f"{path} is missing"
                continue
            known = names.split()
            if place in self.given:
                yield from _compared(path, has, known, known, _without_default(has))
            else:
                yield from _compared(path, has, (), known, ())


@cache
def warn_if_untried(used: Used) -> None:
    """Log one warning in this process for a version that fits and was never tried."""
    numbers = used.version.split("+")[0].split(".")
    if not any(numbers[: len(tried)] == tried for tried in (each.split(".") for each in used.tried)):
        logging.getLogger(__name__).warning(
            "%s %s has the names and signatures that kvtier uses, but kvtier was tried with %s alone; see %s",
            used.engine,
            used.version,
            " and ".join(used.tried),
            Remedy.CONFIGURATION,
        )


def _parameters(of: Callable[..., object]) -> Mapping[str, Parameter]:
    return inspect.signature(of).parameters


def _without_default(parameters: Mapping[str, Parameter]) -> set[str]:
    return {name for name, each in parameters.items() if each.default is Parameter.empty}


def _compared(
    name: str, has: Mapping[str, Parameter], order: Collection[str], needed: Iterable[str], bound: Iterable[str]
) -> Iterator[str]:
    """Yield the engine's parameters if any `needed` is missing, a `bound` one not in `order`, or the order differs."""
    same = [each for each in has if each in order] == [each for each in order if each in has]
    if not (same and set(has).issuperset(needed) and set(order).issuperset(bound)):
        yield f"{name}({', '.join(has)}) differs from the known ({', '.join(order or needed)})"
