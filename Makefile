# Every target works on a fresh machine with Python >= 3.11: the virtual environment is made on first use.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
KERNEL_STAMP := $(VENV)/.kernel-packages
TRITON := $(VENV)/triton
# Many tests wait for other processes or for a deadline, so that one more test than there are cores runs at a time.
WORKERS ?= $(shell $(PYTHON) -c 'import os; print(min(8, (os.cpu_count() or 1) + 1))')
PYTEST := $(BIN)/python -m pytest
INTERPRETED := PYTHONPATH=$(TRITON) TRITON_INTERPRET=1 $(PYTEST)
# pip would compile every module of every package, one after the other; Python compiles those that are imported.
PIP    := $(BIN)/pip install --quiet --no-compile --disable-pip-version-check --constraint constraints.txt
# The theme's makers announce with each build that another generator will replace it in 2027.
MKDOCS := NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs
# Thousands of Python processes are started. Without its bytecode files each of them would compile the package again.
unexport PYTHONDONTWRITEBYTECODE
# Compiled kernels are kept in the user's folder of caches. Without a home each process would compile them.
ifneq ($(shell test -w "$$HOME" && echo yes),yes)
export XDG_CACHE_HOME ?= $(abspath $(VENV))/cache
endif
# Torch would start a thread per core in every rank, and they would spin while they wait for each other.
test check soak: export OMP_NUM_THREADS ?= 1

.PHONY: demo test check torch-suite gpu lint unit-tests warm-kernels warm-tests triton-tests soak arm bench docs docs-look docs-serve interface tested-with dist release-notes clean
demo: $(STAMP)
	$(BIN)/totalreduce demo $(ARGS)

# Tests with the mark "alone" follow when nothing else runs. With ARGS only the selected tests run, one after the other.
ifdef ARGS
test: $(STAMP)
	$(PYTEST) -m "not slow" $(ARGS)
else
# Not after $(STAMP): kernels are compiled while the packages that they do not need are installed.
test:
	$(MAKE) --jobs 3 lint warm-tests triton-tests
	$(PYTEST) -m "not slow and not alone" -n $(WORKERS) --dist worksteal
	$(PYTEST) -m "not slow and alone" tests/hosts $(shell grep -rl --include "test_*.py" "mark\.alone" tests/threads tests/processes)
endif

# Before a commit: style, types and layers beside the unit tests.
check: $(STAMP)
	$(MAKE) --jobs 2 lint unit-tests

unit-tests: $(STAMP)
	$(PYTEST) -m "not slow" -n auto --maxprocesses 8 --dist worksteal tests/unit

# PyTorch's own tests of torch.distributed, at world sizes 2, 3 and 4: what gloo passes must pass.
torch-suite: $(STAMP)
	$(BIN)/python tests/torch_suite/run.py $(ARGS)

# What one GPU can show, in ten minutes and without a network: with .venv if it is there, else with PYTHON as it is.
gpu:
	PYTHONPATH=src $(if $(wildcard $(STAMP)),$(BIN)/python,$(PYTHON)) tests/gpu/run.py $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check src benchmarks tests examples tools
	$(BIN)/ruff format --check src benchmarks tests examples tools
	$(BIN)/mypy
	$(BIN)/lint-imports

# One process compiles Numba's kernels and another one the Python modules where that was not done yet. Parallel workers
# that find none would each compile all of them.
warm-kernels: $(KERNEL_STAMP)
	PYTHONPATH=src $(BIN)/python -c 'import torch; from totalreduce.kernels import ahead, exchange, relay; torch.optim.SGD([torch.zeros(1)]); ahead.load(); ahead.load_codecs(); exchange.load(); relay.load()'

warm-tests: $(STAMP)
	$(PYTEST) --collect-only --quiet > $(VENV)/.collected || { tail -n 30 $(VENV)/.collected; exit 1; }

# The tests of Triton's kernels, in its interpreter. They are one process, which runs beside lint and warm-tests.
triton-tests: $(TRITON)/.installed warm-kernels
	$(INTERPRETED) -m "not slow" tests/unit/kernels/test_device_accumulator.py tests/unit/project/test_exports.py tests/processes/test_registration.py

# What is too long for every commit: a thousand simulated seeds, a thousand training steps, faults under load.
soak: $(STAMP) $(TRITON)/.installed
	$(PYTEST) -m slow --timeout 1800 $(ARGS)
	$(if $(ARGS),,$(INTERPRETED) -m slow tests/unit/kernels/test_device_accumulator.py)

# Tests for aarch64 under qemu, on x86-64 with Debian's apt; an hour, and 3 GB from the network at first.
arm: $(STAMP)
	$(BIN)/python tools/run_on_arm.py $(ARGS)

bench: $(STAMP)
	$(BIN)/totalreduce bench report $(ARGS)

# The documentation as a site in build/site, which can be read and searched without a network and without a server.
docs: $(VENV)/.docs
	$(MKDOCS) build

# Pictures of six pages in build/look: light and dark, wide and narrow. Needs Chromium on PATH.
docs-look: docs
	$(BIN)/python tools/look_at_site.py $(ARGS)

docs-serve: $(VENV)/.docs
	$(MKDOCS) serve $(ARGS)

# After an intended change of public names, signatures, commands or options: the files that the tests compare them with.
interface: $(STAMP)
	$(BIN)/python tools/public_interface.py

# The table of libraries with which the tests pass; `--tested-with` writes it.
tested-with: $(STAMP)
	$(PYTEST) -m tested_with --tested-with docs/reference/tested-with.md tests/processes $(ARGS)

# The wheel and the source distribution, in dist/. The wheel carries compiled functions for LEVELS of x86-64, so that the
# first job compiles nothing. They are compiled on x86-64, and linked by `ld` (binutils). `make dist LEVELS=` needs neither.
LEVELS ?= $(if $(filter x86_64,$(shell uname -m)),x86-64 x86-64-v3 x86-64-v4)
dist: $(STAMP)
	$(PIP) build
	$(BIN)/python tools/ship_code.py build/shipped $(LEVELS)
	$(BIN)/python -m build --sdist --wheel

# The release notes of the newest version, from CHANGELOG.md; with ARGS=--check the files that name it are compared.
release-notes:
	@$(PYTHON) tools/release_notes.py $(ARGS)

$(KERNEL_STAMP): constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("totalreduce needs Python 3.11 or newer; set PYTHON=/path/to/python3.11" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch numba
	touch $@

$(STAMP): pyproject.toml benchmarks/pyproject.toml constraints.txt $(KERNEL_STAMP)
	$(PIP) --editable '.[test,dev]' --editable ./benchmarks
	touch $@

# Triton's kernels are tested in its interpreter. It lies beside the rest: where torch finds it, every process loads it.
$(TRITON)/.installed: constraints.txt $(STAMP)
	$(PIP) --no-deps --upgrade --target $(TRITON) "triton; platform_system == 'Linux'"
	mkdir -p $(TRITON) && touch $@

$(VENV)/.docs: $(STAMP)
	$(PIP) --editable '.[docs]'
	touch $@

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
