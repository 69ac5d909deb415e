# Every target works from a fresh clone: the first one to run makes .venv, later ones find it ready.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
READY := .venv/.installed

# Threads torch may use, the same on every machine unless the environment says otherwise.
export OMP_NUM_THREADS ?= 2
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.PHONY: help setup test slow check format bench babilong demo clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(READY)  ## create .venv and install the package with everything needed to work on it

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; try: make PYTHON=/path/to/python3.11")'
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	@touch $@

test: $(READY)  ## run the tests, without the slow ones
	$(BIN)/python -m pytest

slow: $(READY)  ## run the slow tests
	$(BIN)/python -m pytest -m slow

check: $(READY)  ## lint, formatting, types, import order; changes nothing
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(READY)  ## rewrite files: sort imports, fix lint where safe, format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(READY)  ## run the benchmarks
	$(BIN)/python -m benchmarks

babilong: $(READY)  ## train the long-context model: two parts, both as one, what leaks in; goes on where it was stopped (hours)
	$(BIN)/atlas-memory train babilong --out runs/babilong --resume
	$(BIN)/atlas-memory train babilong-places --out runs/babilong-places --resume
	$(BIN)/atlas-memory train babilong-joined --out runs/babilong-joined --resume
	test -e runs/babilong-joined/written.txt || $(BIN)/atlas-memory writes '../shared/data/books/[A-M]*.txt' \
		--model runs/babilong-joined/final --out runs/babilong-joined/written.txt
	$(BIN)/atlas-memory train babilong-settled --out runs/babilong-settled --resume

demo: $(READY)  ## a shipped model reads a million tokens, and answers
	$(BIN)/atlas-memory demo

clean:  ## remove .venv, caches and build products
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	rm -rf src/*.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
