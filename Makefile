# Everything runs from .venv, which `make setup` makes; a second run finds it up to date and is quick.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TORCH := $(shell grep '^torch==' constraints.txt)

export PYRIGHT_PYTHON_IGNORE_WARNINGS = 1
# Some images forbid Python to keep what it has compiled. The tests start hundreds of processes, each of which would
# compile all of planner again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup demo test lint test-of-one-process test-of-many-processes bench sbom clean

setup: $(STAMP)

# torch goes first and pinned, so that pip takes the build at hand for it and no other requirement widens the choice. pip
# uses one core and compiles what it installs one by one: the rest is installed while torch is compiled. What is left
# out is compiled by whoever imports it; some packages ship files that are not for this Python
COMPILE := $(BIN)/python -m compileall -qq -j 0 -x '/(tests|models|pip|setuptools|_vendor)/' $(VENV)/lib || true
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile '$(TORCH)' -c constraints.txt
	($(COMPILE)) & $(BIN)/python -m pip install --quiet --no-compile -c constraints.txt -e '.[hf,dev]' && wait
	$(COMPILE)
	touch $@

demo: setup
	$(BIN)/planner search examples/model.py --gpus 64

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports --no-cache

# Tests of one process run on every core. Those that start processes of their own come after them, one by one, and wait
# now and then: lint runs beside them. It is over long before pytest, whose closing line is the verdict.
test: setup
	$(MAKE) --no-print-directory test-of-one-process
	$(MAKE) --no-print-directory --jobs=2 lint test-of-many-processes

test-of-one-process: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --ignore=tests/distributed -n auto --dist worksteal

test-of-many-processes: setup
	$(BIN)/python -m pytest tests/distributed

# every file of benchmarks/ is a program of its own
bench: setup
	set -e; for file in $(wildcard benchmarks/[!_]*.py); do \
		echo "== $$file"; $(BIN)/python -m benchmarks.$$(basename $$file .py); \
	done

# sbom.json: every package that `make setup` installs, with versions and licences, as CycloneDX. Its own tool is no part
sbom: setup
	test -x $(VENV)-sbom/bin/cyclonedx-py || $(PYTHON) -m venv $(VENV)-sbom
	$(VENV)-sbom/bin/python -m pip install --quiet '$(shell grep '^cyclonedx-bom==' constraints.txt)' -c constraints.txt
	$(VENV)-sbom/bin/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible -o sbom.json $(BIN)/python

clean:
	rm -rf $(VENV) $(VENV)-sbom sbom.json .pytest_cache .ruff_cache .hypothesis .import_linter_cache
