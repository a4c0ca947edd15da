# The project's commands; `make` lists them. Each one first makes the environment that it runs in.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
MAKEFLAGS += --no-builtin-rules
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
.PHONY: help setup demo test crash lint types docs simulate soak disksoak bench bench-compare clean

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
DEMO := demo
SEEDS := 10000
FIRST := 0
PYTHON ?= $(firstword $(foreach name,python3.11 python3.12 python3.13 python3,$(call usable,$(name))))

# A name only counts if it runs: version managers leave names on the path that do not.
usable = $(shell $(1) -c 'import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $(1))

help:  ## list these commands
	@sed -nE 's/^([a-z-]+):.*## (.*)/\1\t\2/p' $(MAKEFILE_LIST) | expand -t 8

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

test: $(INSTALLED)  ## run the tests
	$(BIN)/pytest --numprocesses auto --maxprocesses 4 --dist loadfile

crash: $(INSTALLED)  ## kill writers and cut off disks, ROUNDS times each (300); cutting off needs root
	KVTIER_CRASH_ROUNDS=$(or $(ROUNDS),300) KVTIER_POWER_ROUNDS=$(or $(ROUNDS),300) \
		$(BIN)/pytest tests/fs/test_crash.py --log-cli-level=INFO -o faulthandler_timeout=0

lint: $(INSTALLED)  ## check style, formatting and the direction of imports
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports

types: $(INSTALLED)  ## check types, with mypy and with pyright
	$(BIN)/mypy
	$(BIN)/pyright

docs: $(INSTALLED)  ## build the documentation into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --config-file .mkdocs.yml

simulate: $(INSTALLED)  ## run SEEDS simulated engines under faults, from seed FIRST on, and say what they met
	$(BIN)/python -m kvtier.testing.simulation --seeds $(SEEDS) --first $(FIRST)

soak: $(INSTALLED)  ## run an hour of a busy engine in virtual time: occupancy, memory, and hits beside the prediction
	$(BIN)/python -m tests.benchmarks.soak

bench: $(INSTALLED)  ## run the benchmarks (tests/benchmarks)
	$(BIN)/pytest --benchmark-only tests/benchmarks

bench-compare: $(INSTALLED)  ## compare hot functions with the stored baseline; exit status 1 if one costs more
	$(BIN)/python -m tests.benchmarks.compare

disksoak: $(INSTALLED)  ## fill DIR, a directory that is emptied, for SOAK_S seconds (600) with room for a twentieth of what is written
	KVTIER_SOAK_S=$(or $(SOAK_S),600) KVTIER_SOAK_REQUESTS=3000 $(BIN)/pytest -s tests/fs/test_soak.py --basetemp=$(or $(DIR),$(DEMO)/soak)

clean:  ## remove everything that these commands made
	rm -rf $(VENV) $(DEMO) site dist .benchmarks .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find kvtier backends tests examples -name __pycache__ -type d -prune -exec rm -rf {} +
