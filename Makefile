# `make demo` and `make test` need python3 >= 3.12, make and the package index; nothing else.
PYTHON ?= python3
BIN := .venv/bin
# Compiling dominates, and a file's tests share compiled functions: one file stays on one worker.
WORKERS ?= logical
PYTEST := $(BIN)/python -m pytest

.PHONY: demo test exact lint format lock wheel-check

demo: .venv/ready
	$(BIN)/python -m ready_jax.serve.demo

test: .venv/ready
	$(PYTEST) -n $(WORKERS) --maxprocesses 4 --dist loadfile --no-loadscope-reorder -m "not slow and not gpu"

exact: .venv/ready
	@mkdir -p results
	$(BIN)/python -m ready_jax.serve.exact --json results/exact_nano_cpu.json

lint: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

format: .venv/ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Builds the wheel and imports every module from it, outside this folder.
wheel-check: .venv/ready
	$(PYTEST) -m slow tests/test_packaging.py

# After a change of the dependencies in pyproject.toml.
lock: .venv/ready
	$(BIN)/uv lock --default-index https://pypi.org/simple
	$(BIN)/uv export $(EXPORT) --output-file requirements.lock --quiet
EXPORT := --frozen --extra dev --no-hashes --no-emit-project --no-header --no-annotate

# The environment, made again only when the lock changes. uv, itself in the lock, installs it in seconds instead of
# minutes; where it cannot reach the index that pip is set up for, pip does it.
.venv/ready: requirements.lock
	@$(PYTHON) -c 'import sys; sys.exit(0 if (3, 12) <= sys.version_info < (3, 14) else "$(PYTHON) is Python " + sys.version.split()[0] + "; ready-jax needs 3.12 or 3.13 (jax-triton 0.4 needs 3.12): try make PYTHON=python3.12")'
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet "$$(grep ^uv== requirements.lock)"
	$(BIN)/uv pip install --quiet --no-deps --python $(BIN)/python --requirement requirements.lock || \
		$(BIN)/python -m pip install --quiet --no-deps --requirement requirements.lock
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	@touch $@
