# The project's commands; `make` lists them. Each one first makes the environment that it runs in.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
MAKEFLAGS += --no-builtin-rules
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
.PHONY: help setup demo test lint types docs bench clean

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
DEMO := demo
PYTHON ?= $(firstword $(foreach name,python3.11 python3.12 python3.13 python3,$(call usable,$(name))))

# A name only counts if it runs: version managers leave names on the path that do not.
usable = $(shell $(1) -c 'import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $(1))

help:  ## list these commands
	@sed -nE 's/^([a-z]+):.*## (.*)/\1\t\2/p' $(MAKEFILE_LIST) | expand -t 8

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
	$(BIN)/pytest

lint: $(INSTALLED)  ## check style, formatting and the direction of imports
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports

types: $(INSTALLED)  ## check types, with mypy and with pyright
	$(BIN)/mypy
	$(BIN)/pyright

docs: $(INSTALLED)  ## build the documentation into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --config-file .mkdocs.yml

bench: $(INSTALLED)  ## run the benchmarks (tests/benchmarks)
	$(BIN)/pytest --benchmark-only tests/benchmarks

clean:  ## remove everything that these commands made
	rm -rf $(VENV) $(DEMO) site dist .benchmarks .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find kvtier backends tests examples -name __pycache__ -type d -prune -exec rm -rf {} +
