# Yeoul: everything a fresh machine needs is Python 3.11, pip, make and a C++20 compiler. `make help` lists the targets.

MAKEFLAGS += --no-print-directory
MODEL ?= smollm2-135m
HOST ?= 127.0.0.1
PORT ?= 8000
ARGS ?=
VENV ?= .venv

CANDIDATES := $(wildcard $(VENV)/bin/python) python3.11 python3 python3.12 python3.13 python3.14
IS_NEW = import sys; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(firstword $(foreach found,$(CANDIDATES),$(shell $(found) -c '$(IS_NEW)' 2>/dev/null && echo $(found))))

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet
NATIVE := CMakeLists.txt pyproject.toml $(shell find native -name tests -prune -o -type f -print)
# Two builds at once would write the same files.
LOCK := $(if $(shell command -v flock),flock $(VENV)/build.lock)
# What pyproject.toml lists under a key, for pip.
LISTED = $(BIN)/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))$(1), sep="\n")'
CMAKE = $(if $(wildcard $(BIN)/cmake),$(BIN)/cmake,cmake)
SAY = @echo "==>"

.PHONY: help
help:
	@echo "make serve        set up, get the model $(MODEL), serve it on $(HOST):$(PORT)"
	@echo "                  (MODEL=..., PORT=..., HOST=..., ARGS='further flags of yeoul serve')"
	@echo "make setup        make $(VENV), build and install Yeoul in it (PYTHON=... chooses the interpreter)"
	@echo "make model        get the model $(MODEL)"
	@echo "make test         set up, get the model, run all tests: kernels in C++, then Python"
	@echo "make matrix       1,000 mixes of techniques against solo replies; writes docs/reference/techniques.md"
	@echo "make test-models  the tests of further real models: 2 GB of downloads, many minutes"
	@echo "make check        format, lint, types and the quick tests"
	@echo "make build        build the C++ core again"
	@echo "make clients      run other projects' clients (openai, LangChain, llm, ...) against the server"
	@echo "make test-oracle  make the stored oracles again with torch and transformers (by hand; large download)"
	@echo "make clean        remove everything that was built; models stay"

# Setting up. Each step leaves a file behind and is not repeated until what it depends on changes.

$(BIN)/python:
	@test -n "$(PYTHON)" && $(PYTHON) -c '$(IS_NEW)' 2>/dev/null || { \
	  echo "error: Yeoul needs Python 3.11 or newer$(if $(PYTHON),; $(PYTHON) is not)"; \
	  echo "hint: install it, or name it: make PYTHON=/path/to/python3.11"; exit 1; } >&2
	$(SAY) "making $(VENV) with $(PYTHON)"
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); echo "error: $(PYTHON) cannot make a virtual environment"; \
	  echo "hint: install its venv module (Debian: python3-venv)"; exit 1; } >&2

$(VENV)/.tools: pyproject.toml | $(BIN)/python
	@{ command -v $${CXX:-c++} || command -v g++ || command -v clang++; } >/dev/null || { echo "error: no C++ compiler found"; \
	  echo "hint: install one (Debian: g++), or name it in CXX"; exit 1; } >&2
	$(SAY) "getting the build tools"
	@$(call LISTED,["build-system"]["requires"]) > $@.txt && $(PIP) -r $@.txt
	@$(BIN)/python -c 'from scikit_build_core.build import get_requires_for_build_editable as tools; print(*tools(), sep="\n")' \
	  > $@.txt && $(PIP) -r $@.txt && rm $@.txt
	@touch $@

$(VENV)/.built: $(NATIVE) $(VENV)/.tools
	$(SAY) "building the C++ core and installing Yeoul"
	@$(LOCK) $(PIP) --no-build-isolation -e .
	@touch $@

$(VENV)/.test-tools: $(VENV)/.built
	$(SAY) "getting what the tests need"
	@$(call LISTED,["project"]["optional-dependencies"]["test"]) > $@.txt && $(PIP) -r $@.txt && rm $@.txt
	@touch $@

$(VENV)/.dev-tools: $(VENV)/.test-tools
	$(SAY) "getting the linter and the type checker"
	@$(call LISTED,["project"]["optional-dependencies"]["dev"]) > $@.txt && $(PIP) -r $@.txt && rm $@.txt
	@touch $@

.PHONY: setup model build
setup: $(VENV)/.built
	$(SAY) "Yeoul is set up: $(BIN)/yeoul --help"

model: setup
	$(SAY) "getting the model $(MODEL), if it is not there"
	@if [ -f "$(MODEL)" ]; then echo "$(MODEL)"; else $(BIN)/yeoul pull $(MODEL); fi

build: $(VENV)/.tools
	$(LOCK) $(PIP) --no-build-isolation --no-deps -e .

# Running.

.PHONY: serve
serve: model
	$(SAY) "serving $(MODEL); Ctrl-C ends it"
	@$(BIN)/yeoul serve $(MODEL) --host $(HOST) --port $(PORT) $(ARGS)

# Testing.

QUICK := tests/kv tests/obs tests/ops tests/sched tests/text

.PHONY: test test-models clients check test-oracle
test: $(VENV)/.test-tools model kernel-test kernel-test-neon
	$(SAY) "running the Python tests"
	@$(BIN)/python -m pytest -q -m "not models"

test-models: $(VENV)/.test-tools
	$(SAY) "getting all models of the catalogue (2 GB)"
	@$(BIN)/python bench/fetch_models.py
	@$(BIN)/python -m pytest -q -m models

.PHONY: matrix
MIXES ?= 1000
matrix: $(VENV)/.test-tools
	$(BIN)/python tests/matrix/run_matrix.py --mixes $(MIXES) --page docs/reference/techniques.md

# Other projects' clients against the server, in an environment of their own (by hand; large downloads).
clients: model
	@PYTHON=$(BIN)/python MODEL=$(MODEL) sh bench/clients/run.sh

check: $(VENV)/.dev-tools
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/python -m pytest -q $(QUICK)

# SANITIZE=thread or SANITIZE=address,undefined: the same tests, instrumented, in a build folder of their own.
KERNEL_BUILD = build/native$(if $(SANITIZE),-$(SANITIZE))
.PHONY: kernel-test
kernel-test: | $(VENV)/.tools
	$(SAY) "testing the kernels in C++"
	@$(CMAKE) -S . -B $(KERNEL_BUILD) -DYEOUL_BUILD_TESTS=ON -DYEOUL_SANITIZE=$(SANITIZE) >/dev/null
	@$(CMAKE) --build $(KERNEL_BUILD) --parallel 2 --target kernel_test
	@$(KERNEL_BUILD)/kernel_test

NEON_CXX = aarch64-linux-gnu-g++
.PHONY: kernel-test-neon
kernel-test-neon: | $(VENV)/.tools
	$(SAY) "testing the NEON kernels in an emulator"
	@if ! command -v $(NEON_CXX) >/dev/null || ! command -v qemu-aarch64 >/dev/null; then \
	  echo "skipped: $(NEON_CXX) or qemu-aarch64 is not installed"; \
	else \
	  $(CMAKE) -S . -B build/neon -DYEOUL_BUILD_TESTS=ON -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 \
	    -DCMAKE_CXX_COMPILER=$(NEON_CXX) -DCMAKE_EXE_LINKER_FLAGS=-static >/dev/null && \
	  $(CMAKE) --build build/neon --parallel 2 --target kernel_test && \
	  qemu-aarch64 build/neon/kernel_test --quick; \
	fi

ORACLE_VENV := $(VENV)-oracle
$(ORACLE_VENV)/.ready: | $(BIN)/python
	$(SAY) "making $(ORACLE_VENV) with torch and transformers"
	@$(BIN)/python -m venv $(ORACLE_VENV)
	@$(ORACLE_VENV)/bin/python -m pip --disable-pip-version-check install --quiet torch transformers gguf numpy
	@touch $@

test-oracle: $(ORACLE_VENV)/.ready model
	$(ORACLE_VENV)/bin/python tests/oracle/make.py tiny
	$(ORACLE_VENV)/bin/python tests/oracle/make.py real \
	  $(MODEL)=$$($(BIN)/python -c 'from yeoul.weights.catalogue import find_model; print(find_model("$(MODEL)"))')

.PHONY: clean
clean:
	rm -rf $(VENV) $(ORACLE_VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find yeoul tests bench -name __pycache__ -type d -prune -exec rm -rf {} +
