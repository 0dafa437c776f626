# Every command works from a fresh clone: each target first brings .venv up to date.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
RUNTIME := $(VENV)/.runtime
STAMP := $(VENV)/.installed

.PHONY: help install demo chaos faults test test-long test-all test-newest test-oldest test-peers test-eval test-gpu test-slurm examples docs mutations lint bench reproduce clean

help:  ## show the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*##/\t/'

install: $(STAMP)  ## make .venv and install Swift with its development tools

$(RUNTIME): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable .
	@touch $@

$(STAMP): $(RUNTIME)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@

demo: $(RUNTIME)  ## moving experts against fixed ones, then four processes, one of which is killed: a few minutes
	$(BIN)/python experiments/tour/tour.py

chaos: install  ## kill 40 of 6 real processes, one after the other, each of which comes back
	$(BIN)/python benchmarks/bench_recovery.py

FAULTS := --minutes 60
faults: install  ## break real runs in every way that is known, and judge each time what came of it (FAULTS='--count 100')
	$(BIN)/python -m benchmarks.faults $(FAULTS)

# Three processes on two cores: a quarter of the time a test waits, for processes that it has started or for others.
test: install  ## the quick tests (ten minutes on 2 idle cores)
	$(BIN)/python -m pytest -n 3 --dist worksteal -m 'not slow and not long'

test-long: install  ## whole runs, and more cases of what the quick tests try (four minutes)
	$(BIN)/python -m pytest -n 3 --dist worksteal -m 'long and not slow'

test-all: install  ## all tests, and the quick ones on every newer Python that is installed
	$(BIN)/python -m pytest -n 2 --dist worksteal
	$(BIN)/python tests/other_pythons.py

test-newest: install  ## the quick tests on the newest Python that is installed, if it is newer than this one
	$(BIN)/python tests/other_pythons.py --newest

test-oldest: install  ## the quick tests with the oldest dependencies that pyproject.toml allows
	$(BIN)/python tests/other_pythons.py --oldest

test-peers: $(VENV)/.peers  ## models of the hub against transformers with torch (a minute, after their installation)
	$(BIN)/python -m pytest tests/hub/test_transformers.py tests/hub/test_deepseek.py tests/hub/test_finetuning.py

$(VENV)/.peers: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[peers]'
	@touch $@

test-eval: $(STAMP)  ## lm-eval drives the generation engine (a minute, after its installation)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[eval]'
	$(BIN)/python -m pytest tests/evaluate/test_harness.py

test-gpu: install  ## training and kernels on one NVIDIA GPU, held against a CPU (two minutes; installs the extra cuda13)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[cuda13]'
	$(BIN)/python -m pytest -n 4 --dist worksteal tests/on_gpu

test-slurm: install  ## runs of a real Slurm with three nodes on this machine, one of which is lost (as root, with slurm-wlm; two minutes)
	$(BIN)/python -m pytest -rs tests/elastic/real_runs/test_slurm.py

examples: install  ## run the programs and the notebook of examples/ (two minutes)
	$(BIN)/python -m pytest tests/docs/test_examples.py

docs: $(VENV)/.docs  ## build the site in site/; a link that leads nowhere is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

$(VENV)/.docs: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[docs]'
	@touch $@

mutations: install  ## make 130 lines wrong, one at a time; the quick tests have to find each (about an hour)
	$(BIN)/python -m tests.mutations

lint: install  ## style, types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: install  ## every benchmark: one JSON file, one table (about an hour)
	$(BIN)/python benchmarks/run_all.py

reproduce: install  ## the papers' numbers measured again, each beside the one that is kept (at most half an hour on 2 cores)
	$(BIN)/python benchmarks/reproduce.py

clean:  ## remove the virtual environment and all runs
	rm -rf .venv* .jax_cache runs site
