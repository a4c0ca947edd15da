"""What one version of vLLM says of kvtier, in one process: an import of vLLM takes longer than all that is asked.

    PYTHONPATH=SOURCES:KVTIER VLLM_CACHE_ROOT=EMPTY python version_report.py MODEL DISK

Prints a report as JSON.
"""

import json
import sys

from tests.vllm import mini_engine  # First: it says on which platform vLLM is.

import vllm  # isort: skip
from tests.vllm.calls import mismatches, told_of_failed_stores  # isort: skip


def main(model: str, disk: str) -> dict[str, object]:
    return {
        "version": vllm.__version__,
        "mismatches": list(mismatches()),
        "failed stores": told_of_failed_stores(),
        "prefill noted": mini_engine.prefill_noted(model, f"{disk}/noted"),
        "doors": {door: mini_engine.run(model, f"{disk}/{door}", door) for door in ("first", "second")},
    }


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
