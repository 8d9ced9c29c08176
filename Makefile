# Two commands: `make demo` and `make test`. Both need Python >= 3.10, git and make, nothing else.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

.PHONY: help setup demo test lint types pytest bench-clustering lock clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 20

$(READY): requirements.lock pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --requirement requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	touch $(READY)

setup: $(READY)  ## create .venv with the pinned versions

demo: $(READY)  ## set up, then cluster a photograph, draw it and time it against scikit-learn
	$(BIN)/python examples/picture.py

test: lint types pytest  ## set up, then lint, type check and run the whole test suite

lint: $(READY)  ## ruff
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)  ## mypy
	$(BIN)/mypy

pytest: $(READY)  ## the tests alone
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses auto

bench-clustering: $(READY)  ## the clustering against scikit-learn, SciPy and fastcluster, in one run
	$(BIN)/python benchmarks/clustering.py --output benchmarks/results/clustering.json

lock:  ## pin the newest versions again (needs `make setup` first)
	$(BIN)/uv pip compile --quiet --upgrade --universal --python-version 3.10 --no-header --no-annotate \
		--no-emit-index-url --extra all --extra dev pyproject.toml --output-file requirements.lock

clean:  ## remove .venv and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .hypothesis
