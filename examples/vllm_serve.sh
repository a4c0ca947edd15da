#!/usr/bin/env bash
# vLLM's server over kvtier: a prompt that the server's own cache forgot comes back from host memory, and /metrics says so.
#
#   examples/vllm_serve.sh [OPTION OF vllm serve ...]
#
#   MODEL   a model's name or folder; a tiny one with random weights is made without it
#   KVTIER  the directory of the file tier; a temporary one without it
#   PORT    8000
#
# Needs vllm and kvtier in the environment that is active, and curl.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
scratch=$(mktemp -d)
server=
trap 'if [ -n "$server" ]; then kill "$server" 2>/dev/null && wait "$server" || true; fi; rm -rf "$scratch"' EXIT

port=${PORT:-8000}
directory=${KVTIER:-$scratch/kvtier}
model=${MODEL:-$scratch/model}
[ -n "${MODEL:-}" ] || python "$here/vllm_tiny_model.py" "$model"
mkdir -p "$directory"
export VLLM_CPU_KVCACHE_SPACE=${VLLM_CPU_KVCACHE_SPACE:-1} VLLM_LOGGING_LEVEL=${VLLM_LOGGING_LEVEL:-WARNING}

# 48 blocks of 32 tokens: room for one prompt of 1,000 tokens and a half, so that the second pushes the first out.
vllm serve "$model" --served-model-name demo --host 127.0.0.1 --port "$port" \
    --max-model-len 1280 --block-size 32 --num-gpu-blocks-override 48 --enforce-eager --enable-prompt-tokens-details \
    --kv-transfer-config '{
        "kv_connector": "KVTierConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "cpu_bytes_to_use": "64MiB",
            "secondary_tiers": [{"type": "fs", "root": "'"$directory"'", "capacity_bytes": "1GiB"}]
        }
    }' "$@" &
server=$!

until curl --silent --fail "http://127.0.0.1:$port/health" >"$scratch/health"; do
    kill -0 "$server" || { echo "the server ended before it answered" >&2; exit 1; }
    sleep 1
done

ask() {  # A prompt of 1,000 words that begins at word $1; prints how many of its tokens were cached.
    local words
    words=$(seq "$1" $(($1 + 999)) | awk '{ printf "w%d ", ($1 * 7919) % 1000 }')
    curl --silent --fail "http://127.0.0.1:$port/v1/completions" -H 'Content-Type: application/json' \
        -d "{\"model\": \"demo\", \"prompt\": \"$words\", \"max_tokens\": 8, \"temperature\": 0}" |
        python -c 'import json, sys; print(json.load(sys.stdin)["usage"]["prompt_tokens_details"]["cached_tokens"])'
}

echo "first prompt, new:        $(ask 0) tokens cached"
echo "second prompt, new:       $(ask 500) tokens cached"
echo "third prompt, new:        $(ask 750) tokens cached"
echo "first prompt, once more:  $(ask 0) tokens cached"
echo
curl --silent --fail "http://127.0.0.1:$port/metrics" | grep -E '^kvtier_(primary_(hits_total|rows)|tier_(hits|stored)_total|tier_(chunks|breaker))\{'
