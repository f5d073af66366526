# `make demo` and `make test` each create .venv if it is missing, install what they need, and run.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INPUTS := pyproject.toml constraints.txt

.PHONY: demo test lint clean

demo: $(VENV)/.installed-train
	$(BIN)/structattn compare nearest-neighbor --preset demo
	$(BIN)/structattn compare forecast --preset demo

test: $(VENV)/.installed-dev lint
	$(BIN)/python -m pytest

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Debian ships python3 without ensurepip unless python3-venv is installed: then pip installs itself from outside.
$(BIN)/python:
	$(PYTHON) -m venv $(VENV) 2>/dev/null || \
		{ rm -rf $(VENV) && $(PYTHON) -m venv --without-pip $(VENV) && \
		  $(PYTHON) -m pip --python $(VENV)/bin/python install pip setuptools; }

$(VENV)/.installed-train: $(BIN)/python $(INPUTS)
	$(BIN)/python -m pip install -q -c constraints.txt -e ".[train]"
	@touch $@

$(VENV)/.installed-dev: $(BIN)/python $(INPUTS)
	$(BIN)/python -m pip install -q -c constraints.txt -e ".[dev]"
	@touch $@ $(VENV)/.installed-train

clean:
	rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache
