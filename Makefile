# `make help` lists what there is. Everything runs in .venv, made on first use.
PYTHON ?= python3
BIN := .venv/bin

.DEFAULT_GOAL := help
.PHONY: help run install check test clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):[^#]*## (.*)/  make \1\t\2/' | expand -t 18

run: .venv/run  ## install and train the embedded agent with composer-train (minutes)
	$(BIN)/composer-train

install: .venv/test  ## install the package with everything its tests need

check: .venv/test  ## lint, format check and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: .venv/test  ## install and run the tests
	$(BIN)/pytest -n auto --dist loadfile

clean:  ## remove the virtual environment and tool caches; runs/ stays
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache

.venv/run: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --editable . --constraint constraints.txt
	touch $@

.venv/test: .venv/run
	$(BIN)/pip install --quiet --editable '.[test]' --constraint constraints.txt
	touch $@
