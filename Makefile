PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check
STAMP := $(VENV)/.installed
TEST_STAMP := $(VENV)/.test-installed
CLIENTS_VENV := .venv-clients
CLIENTS_STAMP := $(CLIENTS_VENV)/.installed

# Where torch comes from: its own index has a build without CUDA. A machine with an NVIDIA driver takes PyPI's, which is
# a CUDA build on Linux; so does an empty TORCH_INDEX.
TORCH_INDEX ?= $(if $(shell command -v nvidia-smi),,https://download.pytorch.org/whl/cpu)

# The tests start several hundred processes: none of them should compile the modules of its libraries again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup develop native native-sanitize wheel demo test quick up lint types suite proto docs bench structured chaos abuse batch-kills soak clients clean

setup: $(STAMP)

$(STAMP): pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Baton needs Python 3.11 or newer: set PYTHON=/path/to/python3.11")'
	test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	$(BIN)/python tools/install_torch.py "$(TORCH_INDEX)"
	$(PIP) install --no-compile -e .
	$(BIN)/python -m kv_kernels.native.native_library
	touch $@

# What tests, lint and the generators of stubs and documents need, on top.
# Native kernels that are out of date are built again; where that fails, torch's are tested.
develop: $(TEST_STAMP)
	@$(BIN)/python -m kv_kernels.native.build || true

# The first collection compiles the modules of libraries once; the processes of a run would each compile all of them.
$(TEST_STAMP): $(STAMP)
	$(PIP) install --no-compile -e ".[test]"
	@$(BIN)/python -m pytest -q --collect-only > /dev/null || true
	touch $@

native: setup
	$(BIN)/python -m kv_kernels.native.build

native-sanitize: setup
	$(BIN)/python -m tools.native_sanitizers

wheel:
	$(if $(wildcard $(BIN)/pip),$(PIP),$(PYTHON) -m pip) wheel --no-deps --wheel-dir dist .

demo: setup
	$(BIN)/python -m tools.demo

up: setup
	$(BIN)/baton up

test: develop lint
	$(MAKE) --no-print-directory --jobs=2 types suite

quick: develop
	$(BIN)/python -m pytest -q -n 2 --dist worksteal -m "not slow" tests/unit

suite: develop
	$(BIN)/python -m pytest -q -n 3 --dist loadfile --no-loadscope-reorder

# Clients that applications use, in an environment of their own, against a cluster with a model that follows a script.
# CLIENT_BODIES is a folder for the bodies that they send: make clients CLIENT_BODIES=tests/data/tool_client_bodies
CLIENT_BODIES ?=
clients: develop $(CLIENTS_STAMP)
	$(BIN)/python -m tests.clients $(CLIENTS_VENV)/bin/python $(CLIENT_BODIES)

$(CLIENTS_STAMP): tests/clients/requirements.txt
	test -d $(CLIENTS_VENV) || $(PYTHON) -m venv $(CLIENTS_VENV)
	$(CLIENTS_VENV)/bin/pip --disable-pip-version-check install --no-compile -r $<
	touch $@

lint: develop
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: develop
	$(BIN)/mypy

proto: develop
	$(BIN)/python -m tools.generate_stubs

docs: develop
	$(BIN)/python -m tools.api_reference

bench: develop
	$(BIN)/python -m benchmarks all

structured: develop
	$(BIN)/python -m pytest -q tests/structured --structured-generations=500 --every-fault --timeout=600

chaos: develop
	$(BIN)/python -m pytest -q tests/chaos tests/faults --chaos-rounds=200 --every-fault

abuse: develop
	$(BIN)/python -m pytest -q tests/abuse --abuse-seconds=30

batch-kills: develop
	$(BIN)/python -m pytest -q tests/soak/test_batch_kills.py --batch-kills=20 --timeout=900 -s

soak: develop native-sanitize
	$(BIN)/python -m pytest -q -n 2 --dist loadfile tests/unit tests/contract tests/parity --hypothesis-profile=random --every-fault
	$(BIN)/python -m pytest -q tests/soak --soak-seconds=1800 --storm-seconds=60 --kills=20 --fuzz-cases=5000 --pool-operations=100000 --batch-kills=20 --every-fault --timeout=2400

clean:
	rm -rf $(VENV) $(CLIENTS_VENV) .demo build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis kernels/kv_kernels/native/*.so kernels/kv_kernels/native/build_failure.txt
