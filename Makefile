# The project's commands; `make` lists them. Each one makes the environment that it runs in.
# Tests that need an environment or servers of their own are run by `tests/<folder>/run`.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
MAKEFLAGS += --no-builtin-rules
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all test-sglang test-vllm check docs dist bench simulate crash clean

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
DEMO := demo
SEEDS := 10000
FIRST := 0
ROUNDS := 300
FROM_mermaid.min.js := mermaid@11.17.2
PATH_mermaid.min.js := package/dist/mermaid.min.js
FROM_iframe-worker.js := iframe-worker@1.0.4
PATH_iframe-worker.js := package/shim/index.js
FOR_PAGES := docs/assets/npm/mermaid.min.js docs/assets/npm/iframe-worker.js

# Empty, it lets Python keep what it compiles: the tests start a thousand interpreters that all import kvtier.
export PYTHONDONTWRITEBYTECODE :=

help:  ## list these commands
	@sed -nE 's/^([a-z-]+):.*## (.*)/\1\t\2/p' $(MAKEFILE_LIST) | expand -t 12

setup: $(INSTALLED)  ## make .venv with kvtier and all its tools; PYTHON=/path/to/python3

$(INSTALLED): pyproject.toml .constraints.txt
	tests/venv $(VENV) --editable '.[dev,docs]'

demo: $(INSTALLED)  ## show times to first token, then replay a workload with real bytes; figures land in demo/
	mkdir -p $(DEMO)
	$(BIN)/kvtier simulate generated --quiet --json $(DEMO)/simulate.json
	@echo
	$(BIN)/kvtier replay generated --json $(DEMO)/replay.json --plot $(DEMO)/replay.png
	@echo "The figures are in $(DEMO)/replay.json, the picture in $(DEMO)/replay.png."

# One worker more than there are cores, up to four: tests wait, too.
WORKERS := $(shell cores=$$(getconf _NPROCESSORS_ONLN); echo $$((cores < 4 ? cores + 1 : 4)))
# One thread of torch's for each worker: on few cores, more of them mostly wait for each other, and do so busily.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/pytest --numprocesses $(WORKERS) --dist loadfile --ignore tests/gpu

test: $(INSTALLED)  ## run the tests that stay in one process: a minute or two
	$(PYTEST) -m "not outside"

test-all: test  ## run `test`, then the tests with processes, kills, mounts, packages, pages, tensors and 200 examples
	HYPOTHESIS_PROFILE=$(or $(HYPOTHESIS_PROFILE),ci) $(PYTEST) -m "(outside or hypothesis) and not traces"

test-vllm:  ## run the tests inside vLLM, in .venv-vllm
	tests/vllm/run

test-sglang:  ## run the tests with SGLang's host pools and controller, in .venv-sglang
	KVTIER_SGLANG_PAGES=30000 tests/sglang/run

check: $(INSTALLED)  ## check style, formatting, the direction of imports, and types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports
	$(BIN)/mypy
	$(BIN)/pyright

docs: $(INSTALLED) $(FOR_PAGES)  ## build the documentation into site/, as pages that can be opened as files
	$(BIN)/pytest -q tests/docs/test_prose.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --config-file .mkdocs.yml

# Pages draw diagrams with the first file, and search without a server with the second. Without npm the files are empty.
$(FOR_PAGES): | $(INSTALLED)
	mkdir -p $(@D) && folder=$$(mktemp -d) && trap 'rm -r "$$folder"' EXIT && \
	{ npm pack --silent --pack-destination "$$folder" $(FROM_$(@F)) >/dev/null && \
		tar --extract --to-stdout --file "$$folder"/*.tgz $(PATH_$(@F)) || \
		echo "npm has no $(FROM_$(@F)) here: the pages do without it" >&2; } >$@

# The build is isolated: hatchling comes from an index, as for a user who installs the sdist.
dist: $(INSTALLED)  ## build sdist and wheel into dist/, and try them in empty environments, on every Python of this machine
	rm -rf dist
	$(BIN)/python -m build --outdir dist
	$(BIN)/twine check --strict dist/*
	@# W102: troubleshooting.md comes from docs/, for `kvtier help`.
	$(BIN)/check-wheel-contents --ignore W102 --toplevel kvtier,kvtier_backends --package kvtier --package backends/kvtier_backends dist/*.whl
	$(BIN)/python -m tests.dist dist

simulate: $(INSTALLED)  ## run SEEDS simulated engines and hosts of engines under faults (10,000), from seed FIRST on
	$(BIN)/python -m tests.simulation --seeds $(SEEDS) --first $(FIRST)
	$(BIN)/python -m tests.simulation --seeds $(SEEDS) --first $(FIRST) --hosts

crash: $(INSTALLED)  ## kill writers, engines and keepers, and cut off disks, ROUNDS times each (300); cutting off needs root
	KVTIER_CRASH_ROUNDS=$(ROUNDS) KVTIER_POWER_ROUNDS=$(ROUNDS) \
		$(BIN)/pytest tests/fs/promises/test_crash.py tests/fs/host/test_kills.py --log-cli-level=INFO -o faulthandler_timeout=0

bench: $(INSTALLED)  ## compare the costs of hot functions with their stored baseline
	$(BIN)/python -m tests.benchmarks.compare

clean:  ## remove everything that these commands and the tests' made
	rm -rf .venv* $(DEMO) docs/assets/npm site dist .benchmarks .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find kvtier backends tests examples -name __pycache__ -type d -prune -exec rm -rf {} +
