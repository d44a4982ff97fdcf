# Every target works on a fresh machine with Python >= 3.11: the virtual environment is made on first use.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
TRITON := $(VENV)/triton

.PHONY: demo test torch-suite lint soak bench clean
demo: $(STAMP)
	$(BIN)/totalreduce demo $(ARGS)

test: $(STAMP) $(TRITON)/.installed lint
	$(if $(ARGS),,$(BIN)/python -m pytest -m "not slow" -n auto --maxprocesses 8 tests/unit tests/simulated)
	$(BIN)/python -m pytest -m "not slow" $(or $(ARGS),--ignore tests/unit --ignore tests/simulated)
	$(if $(ARGS),,PYTHONPATH=$(TRITON) TRITON_INTERPRET=1 $(BIN)/python -m pytest tests/unit/test_device_accumulator.py tests/unit/test_exports.py)

# PyTorch's own tests of torch.distributed, at world sizes 2, 3 and 4: what gloo passes must pass.
torch-suite: $(STAMP)
	$(BIN)/python tests/torch_suite/run.py $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check src tests examples
	$(BIN)/ruff format --check src tests examples
	$(BIN)/mypy
	$(BIN)/lint-imports

# What is too long for every commit: a thousand simulated seeds, a thousand training steps, faults under load.
soak: $(STAMP)
	$(BIN)/python -m pytest -m slow --timeout 1800 $(ARGS)

bench: $(STAMP)
	$(BIN)/totalreduce bench report $(ARGS)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("totalreduce needs Python 3.11 or newer; set PYTHON=/path/to/python3.11" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[test,dev]'
	touch $(STAMP)

# Triton's kernels are tested in its interpreter. It lies beside the rest: where torch finds it, every process loads it.
$(TRITON)/.installed: constraints.txt $(STAMP)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --no-deps --upgrade --target $(TRITON) "triton; platform_system == 'Linux'"
	mkdir -p $(TRITON) && touch $@

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
