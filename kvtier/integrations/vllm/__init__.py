"""kvtier inside vLLM: name this module as `kv_connector_module_path`, `spec_module_path`, or a tier's `module_path`.

vLLM's offloading interface is young and changes with every release. A version that kvtier was not tried with is refused
here, in one sentence, before the imports below. With such a version these imports could fail anywhere, or worse, not
fail.
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


require_known_version()

from kvtier.integrations.vllm.connector import KVTierConnector  # noqa: E402
from kvtier.integrations.vllm.secondary import KVTierSecondaryTier  # noqa: E402
from kvtier.integrations.vllm.spec import KVTierOffloadingSpec  # noqa: E402

__all__ = ["KNOWN_VERSIONS", "KVTierConnector", "KVTierOffloadingSpec", "KVTierSecondaryTier", "require_known_version"]
