# Mooncake's master and its owners of memory. From the repository's root:
#
#   docker build -f examples/fleet/store.Dockerfile -t registry.example.org/mooncake-store:0.3.13.post1 .
FROM python:3.12-slim-bookworm

RUN apt-get update \
 && apt-get install --yes --no-install-recommends libcurl4 libibverbs1 libnuma1 \
 && rm -rf /var/lib/apt/lists/*
RUN python3 -m pip install --no-cache-dir mooncake-transfer-engine-non-cuda==0.3.13.post1
USER 65532:65532
