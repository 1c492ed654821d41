# Every target makes the environment it runs in; the second time that costs nothing.
# ARGS is handed to the program: make train ARGS="--zero 2", make test ARGS="-k mesh".

VENV := .venv
BIN := $(VENV)/bin
# A CUDA machine trains on its GPU with EXTRAS=dev,cuda.
EXTRAS := dev
WORKERS := 2
ARGS :=

# Empty: .ci/setup chooses.
PYTHON :=
LANE :=

# Checkouts of other repositories, as FOREIGN/owner/name.
FOREIGN :=

# Compilers for GPUs and TPUs that are not here, for tests/compiled; no: skip those.
COMPILERS := yes

LAUNCH_TESTS := $(addprefix tests/multiprocess/test_,launch.py leader.py memory.py lease.py hosts.py schedulers.py ray.py newcomer.py)

# With it, every process of the tests compiles the source of all that it imports.
unexport PYTHONDONTWRITEBYTECODE

PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

.PHONY: help train gpu test test-more test-all test-foreign test-oracle test-launch lint format setup compilers clean

help: ## Print this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | expand -t 12

train: setup ## Train the GPT of recipes/pretrain.py on real text
	@$(BIN)/python recipes/pretrain.py $(ARGS)

gpu: setup ## Measure on this machine's GPU for nine minutes at most, into runs/gpu_day
	@$(BIN)/python benchmarks/gpu_day.py --out runs/gpu_day $(ARGS)

test: compilers ## Run one case of everything that matters, in a few minutes
	@$(PYTEST) -m "not slow and not thorough" $(ARGS)

test-more: compilers ## Run the other cases that take up to a minute each
	@$(PYTEST) -m "thorough and not slow" $(ARGS)

test-all: compilers ## Run every test, the long versions too (hours)
	@$(PYTEST) --optimized --soak -o faulthandler_timeout=1800 $(ARGS)
	@$(PYTEST) --optimized --devices 16 tests/equivalence/test_pipeline.py -m slow

test-foreign: setup ## Train public models from checkouts in FOREIGN, as one device does
	@$(BIN)/python -m pytest tests/foreign/real $(if $(FOREIGN),--foreign $(FOREIGN)) $(ARGS)

test-oracle: ## Compare published models with transformers, in an environment with torch
	@$(MAKE) --no-print-directory test COMPILERS=no EXTRAS=dev,oracle \
	  ARGS="tests/models/hf $(ARGS)"

test-launch: setup ## Start real runs: supervisors, Slurm, MPI, network namespaces
	@$(BIN)/python -m pytest $(LAUNCH_TESTS) $(ARGS)

lint: setup ## Check style (ruff) and types (pyright)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(BIN)/pyright --pythonpath $(BIN)/python

format: setup ## Rewrite the files in the style that lint checks
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

setup: ## Make or refresh the virtual environment
	@.ci/setup --venv $(VENV) --extras $(EXTRAS) \
	  $(if $(PYTHON),--python $(PYTHON)) $(if $(LANE),--lane $(LANE))

# As setup, and the compilers.
compilers:
	@.ci/setup --venv $(VENV) --extras $(EXTRAS) --compilers $(COMPILERS) \
	  $(if $(PYTHON),--python $(PYTHON)) $(if $(LANE),--lane $(LANE))

clean: ## Delete environments and caches (not what runs have written)
	rm -rf .venv .venv.lock .ci/venvs .cache .hypothesis .pytest_cache .ruff_cache \
	  build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
