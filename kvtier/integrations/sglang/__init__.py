"""kvtier inside SGLang: name this module as `module_path` of HiCache's storage backend `dynamic`.

SGLang's storage interface changes with every release. A version that kvtier was not tried with is refused here, in one
sentence, before the imports below.
"""

from sglang.version import __version__

from kvtier.errors import ConfigError

KNOWN_VERSIONS = ("0.5.22", "0.5.23")


def require_known_version(installed: str = __version__) -> str:
    """Return a version as "major.minor.patch"; `ConfigError` if it is not one of `KNOWN_VERSIONS`."""
    found = ".".join(installed.split("+")[0].split(".")[:3])
    if found not in KNOWN_VERSIONS:
        raise ConfigError(
            f"kvtier works inside SGLang {' and '.join(KNOWN_VERSIONS)}, and this is SGLang {installed}: install one of"
            " these, or a kvtier that knows this one"
        )
    return found


require_known_version()

from kvtier.integrations.sglang.storage import KVTierStorage  # noqa: E402

__all__ = ["KNOWN_VERSIONS", "KVTierStorage", "require_known_version"]
