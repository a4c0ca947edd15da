# vLLM's own image with kvtier in it. From the repository's root:
#
#   docker build -f examples/fleet/engine.Dockerfile -t registry.example.org/kvtier-engine:0.2.0 .
FROM vllm/vllm-openai:v0.33.0

# What Mooncake's wheel leaves to the system.
RUN apt-get update \
 && apt-get install --yes --no-install-recommends libcurl4 libibverbs1 libnuma1 \
 && rm -rf /var/lib/apt/lists/*

# kvtier moves host memory only, so Mooncake without CUDA serves. If the image has Mooncake already, that one stays.
COPY pyproject.toml README.md LICENSE /src/kvtier/
COPY kvtier /src/kvtier/kvtier
COPY backends /src/kvtier/backends
RUN python3 -m pip install --no-cache-dir '/src/kvtier[seal]' \
 && { python3 -c 'import mooncake.store' || python3 -m pip install --no-cache-dir '/src/kvtier[mooncake]'; } \
 && python3 -c 'import mooncake.store, kvtier.integrations.vllm'
