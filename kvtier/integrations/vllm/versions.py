"""The known versions of vLLM: those that this shim has been tried with.

Their offloading interface is young and changes with every release; what was not tried is refused at the start, in one
sentence, instead of failing in the middle of a step.
"""

from vllm import __version__

from kvtier.errors import ConfigError

KNOWN_VERSIONS = ("0.32", "0.33")


def require_known_version(installed: str = __version__) -> str:
    """Return a version as "major.minor"; `ConfigError` if it is not one of `KNOWN_VERSIONS`."""
    found = ".".join(installed.split(".")[:2])
    if found not in KNOWN_VERSIONS:
        raise ConfigError(
            f"kvtier works inside vLLM {' and '.join(KNOWN_VERSIONS)}, and this is vLLM {installed}: install one of"
            " these, or a kvtier that knows this one"
        )
    return found
