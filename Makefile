# Every target does its own set-up: Python 3.10 or later and make are all it takes. A second call reinstalls nothing.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
OLDEST := .venv-oldest
# Test processes import thousands of modules each, so bytecode is kept even where the environment says not to.
export PYTHONDONTWRITEBYTECODE :=
# One thread a test process. Each imports for eleven seconds; a test that waits for processes of its own keeps a core busy.
PYTEST := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(BIN)/pytest -n 2 --no-loadscope-reorder
# Text without an encoding is an error in the tests; torch opens some when it is imported.
PYTEST := PYTHONWARNDEFAULTENCODING=1 PYTHONWARNINGS=ignore::EncodingWarning:torch $(PYTEST)
# Tests of what readers see, which make docs runs.
PAGES := tests/test_docs.py tests/test_newcomers.py tests/test_examples.py tests/test_pages.py
# Tests in several processes, and on a device that is not the CPU: a fifth of the time, with those as on other machines.
PROCESSES := tests/test_second_device.py tests/sharpness/test_sharded.py tests/sharpness/test_distributed.py \
	tests/quotient_manifolds/optim/test_optim_sharded.py
PACKAGES := tests quotient_manifolds sharpness --ignore tests/laboratory $(PAGES:%=--ignore %)

.PHONY: help demo test studies elsewhere coverage exhaustive test-oldest lint types docs figures bench gpu wheel clean

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1	/p' Makefile | expand -t 14

demo: $(VENV)/.demo  ## train a vision transformer, measure it and ten reparametrisations, draw the picture (a minute)
	OMP_NUM_THREADS=1 $(BIN)/sharpness demo $(ARGS)

test: $(VENV)/.dev  ## run the tests of the packages (five minutes on two cores); ARGS="-k name" chooses
	$(PYTEST) $(PACKAGES) $(PROCESSES:%=--ignore %) $(ARGS)

studies: $(VENV)/.dev  ## run the tests of the laboratory: reproduction/ and studies/
	$(PYTEST) reproduction tests/laboratory $(ARGS)

elsewhere: $(VENV)/.dev  ## run the tests of numerics with plain vector instructions and moved seeds, where what passes here by luck fails, in several processes, and on a second device
	ATEN_CPU_CAPABILITY=default MKL_ENABLE_INSTRUCTIONS=SSE4_2 MOVE_SEEDS=$${MOVE_SEEDS:-1000} \
		$(PYTEST) tests/quotient_manifolds tests/sharpness $(firstword $(PROCESSES)) $(ARGS)

coverage: $(VENV)/.dev  ## run the tests and list the lines that none of them reaches
	$(PYTEST) --cov=quotient_manifolds --cov=sharpness --cov-report=term-missing:skip-covered --cov-fail-under=95 $(ARGS)

exhaustive: $(VENV)/.dev  ## what make test samples: every architecture, 12,000 wrong inputs, 18 ways of sharding, processes, a second device (up to an hour)
	EXHAUSTIVE=1 $(PYTEST) $(ARGS)

test-oldest: $(OLDEST)/.done  ## run the tests with the oldest supported versions of torch, geoopt, transformers (Python 3.10, 3.11)
	$(PYTEST:$(BIN)/%=$(OLDEST)/bin/%) $(PACKAGES) $(ARGS)

lint: $(VENV)/.dev  ## check style, docstrings, and which file may import which
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/ruff format --check --isolated --line-length 84 README.md $$(find docs -name '*.md' -not -path '*/_build/*')
	$(BIN)/lint-imports --no-logo

types: $(VENV)/.dev  ## check the types
	$(BIN)/mypy

docs: $(VENV)/.dev  ## build the documentation into docs/_build, where a warning is an error; run the code of its pages and the examples
	OMP_NUM_THREADS=1 $(BIN)/sphinx-build -W --keep-going -q -b html docs docs/_build
	$(PYTEST) $(PAGES)

figures: $(VENV)/.dev  ## draw the figures of the documentation again from the recorded results
	$(BIN)/python -m studies.figures
	$(BIN)/python -m studies.generalization report

bench: $(VENV)/.dev  ## run the benchmarks that need no data; the others say with --help what they need
	for name in projection geodesic_cost iteration_cost sam_cost lora_cost memory; do \
		$(BIN)/python -m benchmarks.$$name $(ARGS) || exit 1; done

gpu: $(VENV)/.dev  ## run what a GPU of 80 GB is to be measured with, in under eight minutes
	PYTHON=$(CURDIR)/$(BIN)/python benchmarks/gpu.sh

wheel: $(BIN)/uv  ## build a wheel and try it in an empty environment with the core dependencies only
	rm -rf build/wheel && $(BIN)/uv build --quiet --wheel --out-dir build/wheel
	$(BIN)/uv venv --quiet --python $(BIN)/python build/wheel/venv
	$(BIN)/uv pip install --quiet --python build/wheel/venv/bin/python build/wheel/*.whl
	cd build/wheel && venv/bin/python -W ignore ../../tests/support/core_only.py

clean:  ## remove everything that the targets made
	rm -rf $(VENV) $(OLDEST) docs/_build build *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .coverage*

# uv installs in seconds what takes pip minutes.
$(BIN)/uv:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet uv

$(VENV)/.demo: $(BIN)/uv setup.cfg pyproject.toml
	@echo "installing PyTorch and what the demo needs into $(VENV) (6 GB; once)"
	$(BIN)/uv pip install --quiet --python $(BIN)/python --editable '.[demo]'
	touch $@

$(VENV)/.dev: $(BIN)/uv setup.cfg pyproject.toml
	@echo "installing PyTorch and what tests need into $(VENV) (6 GB; once)"
	$(BIN)/uv pip install --quiet --python $(BIN)/python --editable '.[dev]'
	touch $@ $(VENV)/.demo

$(OLDEST)/.done: $(BIN)/uv setup.cfg pyproject.toml tests/support/oldest.txt
	$(BIN)/uv venv --quiet --allow-existing --python $(BIN)/python $(OLDEST)
	$(BIN)/uv pip install --quiet --python $(OLDEST)/bin/python --resolution lowest-direct --constraint tests/support/oldest.txt \
		--editable '.[test,transformers,clip,timm,lora,images,datasets,studies,demo]'
	touch $@
