# Two commands set everything up: `make quickstart` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
BASE := requirements/base.txt
DEV := requirements/dev.txt
# Files that wait for processes and clocks run one after the other, files that compute beside them (tests/lanes.py).
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder --durations=10
BESIDE := tests/plan/ tests/serve/ tests/watch/
CHECK_PYTHON = @$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Phalanx needs Python 3.11 or later; say which with: make PYTHON=python3.12 $(or $(RESOLVED:%=test-%),$(MAKECMDGOALS))"; exit 1; }
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# The processes that tests start would each compile what they import.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: quickstart test test-core test-plan test-serve test-watch test-stops test-servers test-processors test-all test-newest test-oldest test-resolved test-torch-2.11 test-trackers test-nixl null-gpu null-gpu-first-run servers clients docs lint contract reference bench gpu env env-dev clean

quickstart: env  ## a model trained on real text, in about three minutes on two cores
	$(BIN)/phalanx train configs/quickstart.toml

test: env-dev  ## the whole suite, in ten minutes on two cores
	$(PYTEST) -m "not slow and not servers and not processors"

test-core test-plan test-serve test-watch: env-dev  ## the suite of one package: the core's, the planner's, that of serving or of watching
	$(PYTEST) -m "not slow and not servers and not processors" $(if $(filter test-core,$@),$(filter-out $(BESIDE),$(wildcard tests/*/ tests/*.py)),$(@:test-%=tests/%))

test-stops: env-dev  ## the suite, while random processes of its tests are stopped for moments: shows tests that depend on timing
	$(PYTEST) -p random_stops -m "not slow and not servers and not processors"

test-servers: env-dev clients  ## real Slurm, sshd, Chromium and Prometheus (after `make servers`), clients of `phalanx serve`, and campaigns of faults
	$(PYTEST) -m "servers and not slow and not processors"

test-all: env-dev  ## and what takes longer
	$(PYTEST) -m "not processors"

test-processors: env-dev  ## numerics under each instruction set of this machine and 1 to 8 threads, and the C kernels on a Haswell and 64-bit Arm
	$(BIN)/python -m pytest -n auto --maxprocesses 2 -m processors tests/processors
	PYTHONPATH=. $(BIN)/python -u tests/processors/table.py

servers:  ## Debian's Slurm, sshd, Chromium and Prometheus, and a compiler and an emulator for 64-bit Arm; as root
	apt-get update -qq
	DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends $$(grep -v '^#' requirements/debian.txt)

clients: $(VENV)-clients/.made  ## lm-evaluation-harness, in an environment of its own

$(VENV)-clients/.made: requirements/clients.txt
	$(PYTHON) -m venv $(VENV)-clients
	$(VENV)-clients/bin/pip install --quiet -r requirements/clients.txt
	$(VENV)-clients/bin/pip install --quiet --no-deps accelerate==1.15.0  # its PyTorch is the suite's
	@touch $@

docs: $(VENV)-docs/.made  ## the manual as a site in build/site, which a browser opens without a server
	NO_MKDOCS_2_WARNING=1 $(VENV)-docs/bin/mkdocs build --strict
	@echo build/site/index.html

$(VENV)-docs/.made: requirements/docs.txt
	$(CHECK_PYTHON)
	$(PYTHON) -m venv $(VENV)-docs
	$(VENV)-docs/bin/pip install --quiet -r requirements/docs.txt
	@touch $@

lint: env-dev
	$(BIN)/ruff format --check src tests bench validation examples deploy docs/hooks lint tools requirements
	$(BIN)/ruff check src tests bench validation examples deploy docs/hooks lint tools requirements
	$(BIN)/mypy
	$(BIN)/python -m lint.language

contract: env-dev  ## record the commands, JSON keys, formats and names that users rely on, after a deliberate change of them
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/contract --record -m "not slow"

reference: env-dev  ## the pages of docs/reference/ that are generated from the code
	$(BIN)/python -m tools.reference

bench: env-dev  ## ratios to peers and physical limits, taken in one run each
	$(BIN)/python -m bench.train.step --only one-rank
	$(BIN)/python -m bench.checkpoint.write
	$(BIN)/python -m bench.data.read

gpu: env  ## bits and speed of the GPUs here, in ten minutes: gpu-report.json and gpu-report.md
	$(BIN)/python -m bench.gpu

test-trackers:  ## what trackers get of a run, by the real W&B, MLflow, TensorBoard and Trackio, in an environment of their own
	$(MAKE) VENV=$(VENV)-trackers DEV=requirements/trackers.txt env-dev
	OMP_NUM_THREADS=1 $(VENV)-trackers/bin/python -m pytest tests/observe/sinks tests/watch/sinks

test-nixl:  ## pages between workers over NIXL, in an environment of their own
	$(MAKE) VENV=$(VENV)-nixl env-dev
	$(VENV)-nixl/bin/pip install --quiet --no-deps -r requirements/nixl.txt
	OMP_NUM_THREADS=1 $(VENV)-nixl/bin/python -m pytest tests/serve/workers/over_nixl

null-gpu:  ## whole steps under PyTorch's CUDA build on a GPU that computes nothing, in an environment of their own (5 GB)
	$(MAKE) VENV=$(VENV)-null-gpu BASE=requirements/base-torch-2.11.txt DEV=requirements/null-gpu.txt env-dev || { echo "make null-gpu needs PyTorch's CUDA wheel and NVIDIA's packages from PyPI, and they could not be installed"; exit 1; }
	tests/null_gpu/build.sh $(VENV)-null-gpu
	tests/null_gpu/with.sh $(VENV)-null-gpu -m pytest tests/null_gpu tests/serve/kv_cache/test_decode_attention.py
	@# Memory that nothing writes is zero only at its first use: both runs read the same then.
	PYTORCH_NO_CUDA_MEMORY_CACHING=1 tests/null_gpu/with.sh $(VENV)-null-gpu -m pytest -p null_gpu.conftest tests/train/test_cuda.py

null-gpu-first-run:  ## make gpu on the null GPU, from a bare environment with wheels; after make null-gpu
	rm -rf build/first-run
	$(VENV)-null-gpu/bin/python tests/null_gpu/first_run.py build/first-run

test-newest:  ## the suite with the newest releases of all dependencies; TORCH=torch==2.14.1 chooses one of PyTorch
	$(MAKE) VENV=$(VENV)-newest RESOLVED=newest test-resolved

test-oldest:  ## the suite with the oldest releases that pyproject.toml declares; TORCH=torch==2.13.0 chooses one of PyTorch
	$(MAKE) VENV=$(VENV)-oldest RESOLVED=oldest test-resolved

test-resolved:  ## the suite in an environment of its own; test-newest and test-oldest call it with RESOLVED
	@test -n '$(RESOLVED)' || { echo "call make test-newest or make test-oldest"; exit 1; }
	$(CHECK_PYTHON)
	$(PYTHON) -m venv $(VENV)
	$(PYTHON) requirements/resolved.py $(RESOLVED) $(TORCH) > $(VENV)/resolved.txt
	$(BIN)/pip install --quiet 'setuptools>=77' -r $(VENV)/resolved.txt
	$(BIN)/pip install --quiet --no-deps --no-build-isolation -e .
	$(BIN)/pip check
	$(PYTEST) -m "not slow and not servers and not processors"

test-torch-2.11:  ## the suite on the oldest PyTorch that is supported, in an environment of its own
	$(MAKE) VENV=$(VENV)-torch-2.11 DEV=requirements/dev-torch-2.11.txt BASE=requirements/base-torch-2.11.txt test

env: $(VENV)/.base
env-dev: $(VENV)/.dev

$(VENV)/.base: $(BASE) pyproject.toml
	$(CHECK_PYTHON)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -r $(BASE)
	$(BIN)/pip install --quiet --no-deps --no-build-isolation -e .
	@touch $@

$(VENV)/.dev: $(VENV)/.base $(DEV)
	$(BIN)/pip install --quiet -r $(DEV)
	@touch $@

clean:
	rm -rf $(VENV) $(VENV)-newest $(VENV)-oldest $(VENV)-torch-2.11 $(VENV)-trackers $(VENV)-nixl $(VENV)-null-gpu $(VENV)-clients $(VENV)-docs build/site .cache runs
