# Everything runs from .venv, which the first target that needs it creates.
#   make demo PYTHON=/path/to/python3.12     when no Python >= 3.12 is found by itself

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
SCRIPTS := .ci/run $(wildcard tools/*.sh examples/*.sh examples/models/*.sh examples/slurm/*.sbatch)

# From fast to slow, so that what is wrong shows early.
TEST_DIRS := $(addprefix tests/,unit patches gloo faults gpu)
PARALLEL_TEST_DIRS := $(addprefix tests/,faults unit)
# The programs among the files there, which have flags.
BENCHMARKS = $(shell grep -l 'parse_args' benchmarks/*.py)

.PHONY: help venv install demo test test-fast lint bench figures soak clean

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

venv: install

install: $(STAMP)  ## create .venv with the package and its tools (PYTHON=... picks the Python)

# The stamp is written last: an install that was killed is done again. A .venv of an older Python
# is emptied, any other is only brought up to date.
$(STAMP): setup.py pyproject.toml constraints.txt
	@rm -f $@
	@if ! $(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null; then \
		python="$$(PYTHON='$(PYTHON)' tools/find_python.sh)"; \
		echo "Creating $(VENV) with $$python"; \
		"$$python" -m venv --clear $(VENV); \
	fi
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[dev,tools]'
	@touch $@

demo: $(STAMP)  ## train a small MoE on real text, stop, resume, and report (minutes on two cores)
	$(BIN)/python tools/demo.py

# One thread a process: several ranks share the cores, and sums keep their order.
test test-fast bench figures: export OMP_NUM_THREADS := 1

# Unit tests use one core and fault tests mostly wait, so two files at a time; the others use all
# cores by themselves.
test: $(STAMP)  ## run all tests
	@status=0; \
	$(BIN)/python -m pytest -n 2 --dist loadfile $(PARALLEL_TEST_DIRS) || status=$$?; \
	$(BIN)/python -m pytest $(filter-out $(PARALLEL_TEST_DIRS),$(TEST_DIRS)) || status=$$?; \
	exit $$status

test-fast: $(STAMP)  ## run the tests that need neither several processes, nor a GPU, nor patience
	$(BIN)/python -m pytest -m 'not slow and not multiprocess and not gpu' $(TEST_DIRS)

lint: $(STAMP)  ## check style, types, layers, patches and scripts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/megatron-resilient patches check
	$(BIN)/shellcheck $(SCRIPTS)

bench: $(STAMP)  ## run the benchmarks, each against a peer in the same run
	for benchmark in $(BENCHMARKS); do $(BIN)/python "$$benchmark"; done

figures: $(STAMP)  ## make the papers' figures and tables again, and docs/figures.md of them
	$(BIN)/python tools/reproduce/book.py

# What it takes: make soak MINUTES=5 SEED=2
MINUTES := 30
SEED := 1

soak: $(STAMP)  ## train while nodes are killed, hang, leave and return (30 minutes)
	$(BIN)/python tools/soak.py --minutes $(MINUTES) --seed $(SEED)

clean:  ## remove what builds, tests and the demo left (not .venv, not runs/)
	rm -rf build dist *.egg-info demo_run soak_run .pytest_cache .hypothesis .mypy_cache .ruff_cache \
		.import_linter_cache
	find megatron_resilient patches tests tools -name __pycache__ -type d -prune -exec rm -rf {} +
