# make run     set up, then EGGROLL on the tiny model; overrides: make run ARGS="algo.steps=100 seed=1"
# make quick   set up, then unit tests and oracles without runs, for every save
# make test    set up, then tests of each promise once on a CPU
# make test-all   set up, then the whole CPU test suite (make test-rest: what make test leaves out)
# make oldest  units and oracles with the oldest torch and transformers that pyproject.toml allows,
#              in an environment of their own; make newest: with the newest that were tried
# make vllm    an environment with vLLM for engine=vllm on a CPU, and the tests that need one
# make gpu     on a machine with a GPU: kernels, whole runs and benchmarks, as many as fit in nine
#              minutes, with the environment that is there (make gpu ARGS=--more goes on)
# make check   set up, then formatter, linter and type checker
# make lock    renew requirements.lock from pyproject.toml
PYTHON ?= python3
BIN = .venv/bin
ARGS ?=
UNITS = "not (run or thorough or slow)"
QUICK = tests/unit tests/oracles $(wildcard plugins)
PYTEST = $(BIN)/python -m pytest -n 2 --dist worksteal

PINNED = torch==2.13.0 transformers==5.23.0 hydra-core==1.3.8 omegaconf==2.3.1
OLDEST = torch==2.11.0 transformers==5.17.0
NEWEST = torch==2.14.1 transformers==5.24.0

.PHONY: run quick test test-all test-rest oldest newest vllm gpu check lock

run: .venv/ready
	$(BIN)/python launch.py algo=eggroll hardware=a100_40g $(ARGS)

quick: .venv/ready
	$(PYTEST) --documented 180 -m $(UNITS) $(QUICK)

test: .venv/ready
	$(PYTEST) --documented 780 -m "not (thorough or slow)"

test-rest: .venv/ready
	$(PYTEST) -m "thorough and not slow"

test-all: .venv/ready
	$(PYTEST) -m "not slow"

oldest: .oldest/ready
	.oldest/bin/python -m pytest -n 2 --dist worksteal -m $(UNITS) $(QUICK)

newest: .newest/ready
	.newest/bin/python -m pytest -n 2 --dist worksteal -m $(UNITS) $(QUICK)

vllm: .venv/ready .vllm/ready
	$(BIN)/python -m pytest -n 2 -m "vllm and not slow"

gpu:  # with the interpreter that is there, without a network
	$(or $(wildcard $(BIN)/python),$(PYTHON)) -m benchmarks.on_gpu $(ARGS)

check: .venv/ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/basedpyright --level error

.venv/ready: requirements.lock pyproject.toml
	$(PYTHON) .ci/set_up.py .venv -r requirements.lock -e .
	@touch $@

.oldest/ready: pyproject.toml
	$(PYTHON) .ci/set_up.py .oldest $(OLDEST) -e .[dev]
	@touch $@

.newest/ready: pyproject.toml
	$(PYTHON) .ci/set_up.py .newest $(NEWEST) -e .[dev]
	@touch $@

.vllm/ready: plugins/vllm/install.py
	$(BIN)/python plugins/vllm/install.py .vllm
	touch $@

lock:
	rm -rf .venv
	$(PYTHON) .ci/set_up.py .venv $(PINNED) "setuptools>=77" -e .[dev]
	$(BIN)/python -m pip freeze --all --exclude pip --exclude uv --exclude-editable | sed 's/+[a-z0-9.]*$$//' > requirements.lock
