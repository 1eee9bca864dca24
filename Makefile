# The commands of this project; README.md and CONTRIBUTING.md explain them.
PYTHON ?= python3
VENV ?= .venv
# Which tests `make test` runs, as a pytest marker expression.
SELECT ?= not long
BIN := $(VENV)/bin
# CMake and the C++ compiler come from the system; everything else from the package index.
SOURCES := pyproject.toml $(wildcard ffi/*)

.PHONY: demo test lint bench wheel clean emulator env-examples env-test env-lint

demo: env-examples
	$(BIN)/python examples/train_lm.py

test: env-test emulator
	$(BIN)/python -m pytest -m "$(SELECT)"

# The PTX emulator that tests run kernels in.
emulator:
	cmake -S tests/emulator/native -B build/emulator -DCMAKE_BUILD_TYPE=Release
	cmake --build build/emulator --parallel

lint: env-lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.examples: $(SOURCES) | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable '.[examples]'
	touch $@

$(VENV)/.test: $(SOURCES) | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable '.[examples,test,export]'
	touch $@ $(VENV)/.examples

$(VENV)/.lint: $(SOURCES) | $(VENV)/.test
	$(BIN)/python -m pip install --quiet --editable '.[examples,test,export,lint]'
	touch $@

env-examples: $(VENV)/.examples
env-test: $(VENV)/.test
env-lint: $(VENV)/.lint

clean:
	rm -rf build dist out
