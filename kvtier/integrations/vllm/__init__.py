"""kvtier inside vLLM: name this module as `spec_module_path`, or as a secondary tier's `module_path`.

The version is looked at first: with one that is not known the imports below could fail anywhere, or worse, not fail.
"""

from kvtier.integrations.vllm.versions import require_known_version

require_known_version()

from kvtier.integrations.vllm.secondary import KVTierSecondaryTier  # noqa: E402
from kvtier.integrations.vllm.spec import KVTierOffloadingSpec  # noqa: E402

__all__ = ["KVTierOffloadingSpec", "KVTierSecondaryTier"]
