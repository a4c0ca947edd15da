#!/usr/bin/env bash
# Start SGLang with kvtier behind its HiCache: `sglang_serve.sh MODEL [FOLDER [CAPACITY]]`. Needs SGLang and a GPU.
set -euo pipefail
model=$1 folder=${2:-/var/tmp/kvtier} capacity=${3:-20GiB}
exec python -m sglang.launch_server --model-path "$model" --enable-hierarchical-cache --hicache-mem-layout page_first \
    --hicache-storage-backend dynamic --hicache-storage-backend-extra-config '{
        "backend_name": "kvtier", "module_path": "kvtier.integrations.sglang", "class_name": "KVTierStorage",
        "interface_v1": 1, "kvtier": {"secondary_tiers": [
            {"type": "fs", "root": "'"$folder"'", "capacity_bytes": "'"$capacity"'", "shared": true}]}}'
