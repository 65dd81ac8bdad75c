# Everything runs from .venv, which `make setup` makes; a second run finds it up to date and is quick.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TORCH := $(shell grep '^torch==' constraints.txt)

export PYRIGHT_PYTHON_IGNORE_WARNINGS = 1

.PHONY: setup demo test lint test-of-one-process bench clean

setup: $(STAMP)

# torch goes first and pinned, so that pip takes the build at hand for it and no other requirement widens the choice;
# nothing is compiled ahead, which takes half of the time and is for modules that most runs never import
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile '$(TORCH)' -c constraints.txt
	$(BIN)/python -m pip install --quiet --no-compile -c constraints.txt -e '.[hf,dev]'
	touch $@

demo: setup
	$(BIN)/planner search examples/model.py --gpus 64

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports --no-cache

# Tests of one process run on every core, with lint, which is one core's work, beside them; those that start processes of
# their own need all cores, one after the other. pytest comes last: its closing line is the verdict.
test: setup
	$(MAKE) --no-print-directory --jobs=2 lint test-of-one-process
	$(BIN)/python -m pytest tests/distributed

test-of-one-process: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --ignore=tests/distributed -n auto --dist worksteal

# every file of benchmarks/ is a program of its own
bench: setup
	set -e; for file in $(wildcard benchmarks/[!_]*.py); do \
		echo "== $$file"; $(BIN)/python -m benchmarks.$$(basename $$file .py); \
	done

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis .import_linter_cache
