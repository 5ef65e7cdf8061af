# Everything that a person runs here. Each target sets up what it needs in .venv by itself; PYTHON chooses the interpreter.
#
#   make demo       merge, verify and load nothing but what lies in the repository; no PyTorch; under a minute
#   make test       every test, with PyTorch (CPU), transformers and peft as oracles
#   make test-core  the tests that need no PyTorch; under a minute
#   make lint       ruff and mypy
#   make bench      against the speed of `cp`, one table

PYTHON ?= python3
JOBS ?= 2
TORCH ?= 2.13.0
DEEPSPEED ?= 0.19.8
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
PYTEST_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
INSTALL := $(PIP) install --quiet --quiet --no-warn-script-location

.PHONY: help demo test test-core lint bench clean

help:
	@sed -n 's/^#   //p' Makefile

demo: $(VENV)/.package
	$(BIN)/python -m unshard demo

test: $(VENV)/.test
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal $(PYTEST_ARGS)

test-core: $(VENV)/.test-core
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m "not torch and not slow" $(PYTEST_ARGS)

lint: $(VENV)/.lint
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

bench: $(VENV)/.package $(VENV)/.torch
	$(BIN)/python -m benchmarks

clean:
	rm -rf $(VENV) build dist demo-output .pytest_cache .mypy_cache .ruff_cache .hypothesis

# The stamps say what .venv holds. They are older than pyproject.toml once that asks for something else.
$(VENV)/.created:
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.package: pyproject.toml $(VENV)/.created
	$(INSTALL) --editable .
	@touch $@

# `--group` came with pip 25.1; the pip that Python brings is often older.
$(VENV)/.pip: $(VENV)/.created
	$(INSTALL) --upgrade "pip>=25.1"
	@touch $@

$(VENV)/.lint: pyproject.toml $(VENV)/.pip $(VENV)/.package
	$(INSTALL) --group lint
	@touch $@

$(VENV)/.test-core: pyproject.toml $(VENV)/.pip $(VENV)/.package
	$(INSTALL) --group test-core
	@touch $@

# The CPU build of PyTorch is a tenth of the other: from wherever pip is set up to look, else from PyTorch's own index,
# else whatever build there is.
$(VENV)/.torch: $(VENV)/.pip
	$(INSTALL) "torch==$(TORCH)+cpu" 2>/dev/null \
	  || $(INSTALL) --index-url $(TORCH_INDEX) "torch==$(TORCH)" \
	  || $(INSTALL) "torch==$(TORCH)"
	@touch $@

# DeepSpeed builds itself with the PyTorch that is there; where it cannot, the few tests that ask it are skipped.
$(VENV)/.test: pyproject.toml $(VENV)/.torch $(VENV)/.package
	$(INSTALL) --group test
	-$(INSTALL) --no-build-isolation "deepspeed==$(DEEPSPEED)" setuptools wheel
	@touch $@
