# Everything a developer or a visitor types. Each target sets up what it needs.
SHELL := /bin/bash
PYTHON ?= python3
VENV ?= .venv
WORKSPACE ?= runs
# Processes that test files are dealt out to: one more than there are cores, as every tenth second of a test is a wait.
WORKERS ?= $(shell echo $$(($$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2) + 1)))
BIN := $(VENV)/bin
# Programs for images, releases and requirements, apart from what the project imports.
TOOLS ?= .venv-tools
# One of the slowest tests may take so long: six times what the longest of them took where others had the processor first.
SLOW_SECONDS ?= 1800
PYTEST_BESIDE := --numprocesses $(WORKERS) --maxprocesses 8 --dist loadfile --max-worker-restart 0
# API servers of their own that the operator's tests start, each with a part of the test files; they mostly wait. A
# cluster that is given is one for all.
CLUSTER_WORKERS ?= 3
CLUSTER_BESIDE = $(if $(FINETUNE_TEST_KUBECONFIG),,--numprocesses $(CLUSTER_WORKERS) --dist loadfile --max-worker-restart 0)
# Of a release.
IMAGES ?= operator trainer
# Where each suite leaves its JUnit report, which `make test-times` reads.
REPORTS ?= .test-reports
REPORT = --junitxml=$(REPORTS)/$@.xml

.DEFAULT_GOAL := help
.PHONY: help install quickstart test test-everything test-gpu-dry trace-memory measure-cpu-memory test-cluster test-e2e test-times test-changed images tools requirements audit \
  release release-compare fuzz gpu-check lint format generate pictures benchmark clean

help: ## Show the targets
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-15s %s\n", $$1, $$2}'

install: $(VENV)/.installed ## Make .venv with the finetune command and everything the tests need

# Two steps: packages of others by hash, then ours, which have none. What comes as source is built with the setuptools of
# build.txt, as pip would download others for it without hashes.
PIP_INSTALL = python -m pip install --quiet --disable-pip-version-check
ENOUGH_PYTHON = $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed; $(PYTHON) is $$($(PYTHON) --version 2>&1). Try: make PYTHON=python3.12 ..." >&2; exit 1; }

$(VENV)/.installed: requirements/build.txt requirements/dev.txt pyproject.toml operator/pyproject.toml trainer_image/pyproject.toml trainer_image/contract/pyproject.toml
	@$(ENOUGH_PYTHON)
	@echo "Installing into $(VENV) (torch and its libraries are large: some minutes the first time)"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/$(PIP_INSTALL) --require-hashes --requirement requirements/build.txt
	PYTHONWARNINGS=ignore $(BIN)/$(PIP_INSTALL) --require-hashes --no-build-isolation --requirement requirements/dev.txt
	PYTHONWARNINGS=ignore $(BIN)/$(PIP_INSTALL) --no-deps --no-index --no-build-isolation --editable trainer_image/contract --editable trainer_image --editable operator
	@touch $@

tools: $(TOOLS)/.installed ## Make .venv-tools with what builds images and releases and renews requirements

$(TOOLS)/.installed: requirements/build.txt requirements/tools.txt
	@$(ENOUGH_PYTHON)
	$(PYTHON) -m venv $(TOOLS)
	$(TOOLS)/bin/$(PIP_INSTALL) --require-hashes --requirement requirements/build.txt
	$(TOOLS)/bin/$(PIP_INSTALL) --require-hashes --no-build-isolation --requirement requirements/tools.txt
	@touch $@

quickstart: install ## Fine-tune, evaluate and predict on this machine (about 2 minutes after installing)
	$(BIN)/finetune run manifests/examples/quickstart.yaml --workspace $(WORKSPACE)

test: install ## Run the tests of T1: all that need no cluster and are cheap (about 6 minutes on 2 cores)
	@mkdir -p $(REPORTS)
	$(BIN)/python -m pytest --cheap $(PYTEST_BESIDE) $(REPORT) $(ARGS)
	@$(PYTHON) .ci/budgets.py --tier T1 $(REPORTS)/test.xml

test-everything: install ## Run all tests with every case of every grid, in parts of at most 40 minutes (PART=1/6)
	@$(BIN)/python .ci/suites.py t3 $(if $(PART),--part $(PART)) $(ARGS)

test-changed: install ## Run the dear tests that a change can break (BASE=main; ARGS=--list names them)
	@$(BIN)/python .ci/suites.py changed $(if $(BASE),--base $(BASE)) $(ARGS)

fuzz: install ## Search for input that breaks a rule: random, 25 times as much as in CI (about 20 minutes)
	$(BIN)/python -m pytest tests/unit tests/trainer tests/cluster/test_generated_specs_accepted.py -m hypothesis \
	  --hypothesis-profile fuzz --timeout $(SLOW_SECONDS) $(PYTEST_BESIDE)

test-gpu-dry: install ## Trace the training loop on fake GPUs: waits, bytes sent, memory of each strategy (about two minutes; needs gcc)
	$(BIN)/python -m pytest tests/tracing $(REPORT)

trace-memory: install ## Trace the memory of the trainer on fake GPUs again, and compare it with the plan's (minutes; needs gcc)
	PYTHONPATH=tests $(BIN)/python -m tracing_support.memory_table --trace

CPU_RUNS ?= runs/cpu-memory
measure-cpu-memory: install ## Train small models on the CPU again, and compare their peak memory with the plan's (half an hour)
	PYTHONPATH=tests $(BIN)/python -m tracing_support.cpu_runs --measure $(CPU_RUNS)

test-cluster: install ## Run the operator's tests on real API servers (needs KUBEBUILDER_ASSETS or FINETUNE_TEST_KUBECONFIG)
	$(BIN)/python -m pytest tests/cluster $(CLUSTER_BESIDE) $(REPORT)

test-e2e: install ## Run whole jobs on a cluster with nodes (a box of its own as root, or FINETUNE_TEST_KUBECONFIG)
	PYTHONPATH=tests $(BIN)/python -m box_support.phases --reports $(REPORTS)

test-times: ## Show the CPU seconds of the last runs: suites, files, the dearest tests
	@$(PYTHON) .ci/budgets.py $(REPORTS)/*.xml

images: tools ## Build both images (REGISTRY=ghcr.io/acme TAG=1.2 ACCELERATOR=cpu; see images/README.md)
	@TOOLS=$(TOOLS) images/build

release: tools ## Make a release in dist/VERSION from the last commit (VERSION=0.1.0; see docs/release.md)
	@test -n "$(VERSION)" || { echo "make release: name the version: make release VERSION=$$(sed -n 's/^version = "\(.*\)"/\1/p' operator/pyproject.toml)" >&2; exit 1; }
	@$(TOOLS)/bin/python release/make_release.py $(VERSION) $(if $(OUT),--out $(OUT)) --images "$(IMAGES)"

release-compare: ## List what differs between two releases (FIRST=dist/0.1.0 SECOND=../again/dist/0.1.0)
	@$(PYTHON) release/archive.py compare $(FIRST) $(SECOND)

requirements: tools ## Write the hashed requirements again, after a change of constraints.txt or a pyproject.toml
	@$(TOOLS)/bin/python requirements/lock.py

audit: tools ## Look for known vulnerabilities in all requirements (asks the index)
	@$(TOOLS)/bin/pip-audit --strict --disable-pip --require-hashes $(foreach file,$(wildcard requirements/*.txt),--requirement $(file)) \
	  || { echo "make audit: failed. Where it says \"could not be audited\" or that there is no connection, nothing was audited: this index has no such data." >&2; exit 1; }

# Pages that people write; those in docs that are generated are read as well.
PROSE = README.md CONTRIBUTING.md CHANGELOG.md $(wildcard docs/*.md images/*.md charts/*/*.md tests/benchmarks/*.md manifests/examples/*.md)
lint: install ## Check style, types, import layers, Dockerfiles, spelling and prose
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/hadolint images/*/Dockerfile
	$(BIN)/codespell
	$(BIN)/proselint --config .proselintrc.json check $(PROSE)
	$(BIN)/python -m pytest -q tests/style $(REPORT)

format: install ## Format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

generate: install ## Write again what is generated: CRD, schema, API reference, lists of known arguments
	$(BIN)/python tests/generate.py

pictures: install ## Draw the dashboards' pictures in docs again (needs prometheus and promtool in PATH)
	$(BIN)/python tests/dashboard_picture.py draw

benchmark: install ## Measure training, prediction and the operator (see tests/benchmarks)
	$(BIN)/python tests/benchmarks/published_padding.py
	$(BIN)/python tests/benchmarks/operator_load.py

gpu-check: install ## Try on this machine's GPUs what tests cannot (15 minutes; NODES=2 NODE=0 FIRST=host:port for several)
	PYTHONPATH=tests $(BIN)/python -m gpu_check $(if $(NODES),--nodes $(NODES) --node $(NODE) --first $(FIRST)) $(ARGS)

clean: ## Remove the virtual environment, caches and results of runs
	rm -rf $(VENV) $(TOOLS) runs $(REPORTS) .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
