# Every target does its own set-up: Python 3.10 or later and make are all it takes. A second call reinstalls nothing.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# One thread a test process: two processes share the machine.
PYTEST := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist loadgroup

.PHONY: demo test lint types docs clean

demo: $(VENV)/.demo
	$(BIN)/sharpness demo $(ARGS)

test: $(VENV)/.dev
	$(PYTEST) $(ARGS)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo

types: $(VENV)/.dev
	$(BIN)/mypy

docs: $(VENV)/.dev
	$(BIN)/sphinx-build -W -b html docs docs/_build

clean:
	rm -rf $(VENV) docs/_build build *.egg-info .pytest_cache .mypy_cache .ruff_cache

# uv installs in seconds what takes pip minutes.
$(BIN)/uv:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet uv

$(VENV)/.demo: $(BIN)/uv setup.cfg pyproject.toml
	$(BIN)/uv pip install --quiet --python $(BIN)/python --editable '.[demo]'
	touch $@

$(VENV)/.dev: $(BIN)/uv setup.cfg pyproject.toml
	$(BIN)/uv pip install --quiet --python $(BIN)/python --editable '.[dev]'
	touch $@ $(VENV)/.demo
