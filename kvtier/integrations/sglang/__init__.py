"""kvtier inside SGLang: name this module as `module_path` of HiCache's storage backend `dynamic`.

SGLang's storage interface changes with its releases. A version that differs in what kvtier uses is refused here, in one
sentence. It would fail anywhere else, or worse, not fail.
"""

from kvtier.integrations.sglang.signatures import SGLANG, TRIED_VERSIONS

with SGLANG.imported():
    from kvtier.integrations.sglang.storage import KVTierStorage

SGLANG.require((KVTierStorage,))

__all__ = ["TRIED_VERSIONS", "KVTierStorage"]
