# Two commands set everything up: `make quickstart` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: quickstart test test-all lint bench env env-dev clean

quickstart: env  ## a model trained on real text, in about three minutes on two cores
	$(BIN)/phalanx train configs/quickstart.toml

test: env-dev  ## the whole suite
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not slow"

test-all: env-dev  ## and what takes longer
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest

lint: env-dev
	$(BIN)/ruff format --check src tests bench validation examples
	$(BIN)/ruff check src tests bench validation examples
	$(BIN)/mypy

bench: env-dev  ## ratios to peers and physical limits, taken in one run each
	$(BIN)/python bench/step.py
	$(BIN)/python bench/checkpoint.py
	$(BIN)/python bench/data.py

env: $(VENV)/.base
env-dev: $(VENV)/.dev

$(VENV)/.base: requirements/base.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Phalanx needs Python 3.11 or later; say which with: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -r requirements/base.txt
	$(BIN)/pip install --quiet --no-deps --no-build-isolation -e .
	@touch $@

$(VENV)/.dev: $(VENV)/.base requirements/dev.txt
	$(BIN)/pip install --quiet -r requirements/dev.txt
	@touch $@

clean:
	rm -rf $(VENV) .cache runs
