PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: setup demo test up lint types suite proto docs bench chaos soak clean

setup: $(STAMP)

$(STAMP): pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Baton needs Python 3.11 or newer: set PYTHON=/path/to/python3.11")'
	test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -e ".[test]"
	touch $@

demo: setup
	$(BIN)/python -m tools.demo

up: setup
	$(BIN)/baton up

test: setup lint
	$(MAKE) --no-print-directory --jobs=2 types suite

suite: setup
	$(BIN)/python -m pytest -q -n 3 --dist loadfile --no-loadscope-reorder

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy

proto: setup
	$(BIN)/python -m tools.generate_stubs

docs: setup
	$(BIN)/python -m tools.api_reference

bench: setup
	$(BIN)/python -m benchmarks all

chaos: setup
	$(BIN)/python -m pytest -q tests/chaos tests/faults --chaos-rounds=200 --every-fault

soak: setup
	$(BIN)/python -m pytest -q tests/soak --soak-seconds=1800 --storm-seconds=60 --kills=20 --fuzz-cases=5000 --pool-operations=100000 --timeout=2400

clean:
	rm -rf $(VENV) .demo build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
