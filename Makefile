# Every target creates or reuses .venv; the first run installs about 3 GB, later ones start at once.
PYTHON ?= python3
BIN := .venv/bin
# Two processes: one begins with the tests of real engines, the other with those of processes;
# tests/groups.py says which. The order stays, so that short unit tests fill the end.
# `make test ARGS="-n 0"` runs them one after the other.
PARALLEL := -n 2 --dist loadfile --no-loadscope-reorder --durations 15

.PHONY: help setup setup-curator setup-k8s setup-nemo-rl setup-prime-rl setup-verl demo docs test test-all test-curator test-fast test-k8s test-nemo-rl test-prime-rl test-ray test-verl lint format clean

help:  ## this list
	@grep -E '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 14

setup:  ## create .venv with everything the other targets need
	@$(PYTHON) scripts/setup_env.py

setup-verl: setup  ## create .venv-verl, where verl's trainer runs
	@$(PYTHON) scripts/setup_trainer_env.py verl

setup-curator: setup  ## create .venv-curator, where NeMo Curator's pipelines run
	@$(PYTHON) scripts/setup_trainer_env.py curator

setup-prime-rl: setup  ## create .venv-prime-rl, where prime-rl's clients run
	@$(PYTHON) scripts/setup_trainer_env.py prime-rl

setup-nemo-rl: setup  ## create .venv-nemo-rl, where NeMo-RL's trainer runs
	@$(PYTHON) scripts/setup_trainer_env.py nemo-rl

setup-k8s: setup  ## find or build a Kubernetes control plane for tests (a quarter of an hour, once)
	@test -n "$$KUBEBUILDER_ASSETS" || scripts/build_control_plane.sh

demo: setup  ## train a tiny policy with GRPO on a real Dynamo stack
	@$(BIN)/rollway demo

docs: setup  ## write docs/api.md from the docstrings
	@$(BIN)/python scripts/api_page.py

test: setup  ## all tests but those of the targets below and the soaks, on real Dynamo and vLLM on CPU
	@$(BIN)/python -m pytest --ignore tests/verl --ignore tests/ray --ignore tests/curator --ignore tests/prime_rl --ignore tests/nemo_rl --ignore tests/kubernetes $(PARALLEL) $(ARGS)

test-all: setup  ## the same, with the soaks and every example of the fuzzers
	@ROLLWAY_TEST_SOAK=1 $(BIN)/python -m pytest --ignore tests/verl --ignore tests/ray --ignore tests/curator --ignore tests/prime_rl --ignore tests/nemo_rl --ignore tests/kubernetes $(PARALLEL) $(ARGS)

test-fast: setup  ## unit and property tests only
	@$(BIN)/python -m pytest -m "not stack" $(ARGS)

test-ray: setup  ## stacks on Ray clusters of several raylets of this machine
	@$(BIN)/python -m pytest tests/ray -n 0 $(ARGS)

test-verl: setup-verl  ## verl's own trainer on a real stack, in all of its modes
	@$(BIN)/python -m pytest tests/verl $(ARGS)

test-curator: setup-curator  ## NeMo Curator's pipelines on real stacks, on a Ray cluster
	@.venv-curator/bin/python -m pytest tests/curator $(ARGS)

test-prime-rl: setup-prime-rl  ## trainings with prime-rl's clients, and with its orchestrator from a checkout
	@$(BIN)/python -m pytest tests/prime_rl $(ARGS)

test-nemo-rl: setup-nemo-rl  ## trainings through NeMo-RL's interfaces, and its own trainer from a checkout
	@$(BIN)/python -m pytest tests/nemo_rl $(ARGS)

test-k8s: setup-k8s  ## everything on Kubernetes, against a real API server with the real CRDs
	@$(BIN)/python -m pytest tests/kubernetes tests/unit/kubernetes -n 0 $(ARGS)

lint: setup  ## ruff and mypy
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

format: setup  ## let ruff rewrite the files
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

clean:  ## remove the environment and caches
	rm -rf .venv .venv-curator .venv-nemo-rl .venv-prime-rl .venv-prime-rl-src .venv-verl .mypy_cache .ruff_cache .pytest_cache .hypothesis
