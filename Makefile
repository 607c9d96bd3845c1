PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.setup-done
RUN_STAMP := $(VENV)/.run-done
PIP := $(BIN)/python -m pip install -c constraints.txt

# Some images set it. Every rank and every command would then compile the package anew: a second of processor time each.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup setup-integrations setup-docs train check test test-slow test-exhaustive test-integrations test-torch site gpu test-gpu audit lint clean

setup: $(STAMP)

# What a run of the quickstart needs. torch first: packages that look for it while they are built must find the pinned one.
$(RUN_STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "shardwise needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) --version 2>&1). Run: make setup PYTHON=python3.11" >&2; exit 1; }
	@echo "[1/3] a virtual environment in $(VENV)"
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV)  # one that was interrupted has no pip
	@echo "[2/3] PyTorch 2.13.0, by far the largest part"
	@$(PIP) torch==2.13.0
	@echo "[3/3] shardwise, transformers, and what its terminal and its reports need"
	@$(PIP) -e '.[cli]'
	@touch $@

# What else tests, checks and other kinds of data need.
$(STAMP): $(RUN_STAMP)
	@echo "packages for tests, checks and tables of data"
	@$(PIP) --quiet -e '.[train,dev]'
	@touch $@

# The run's last line is its report's path, so what else to try is said first.
train: $(RUN_STAMP)
	@echo "After this run, a longer one, which writes better:"
	@echo "  $(BIN)/shardwise train quickstart log.name=longer train.steps=2000"
	@echo "what the run has written, and whether it is whole:"
	@echo "  $(BIN)/shardwise inspect runs/quickstart/final"
	@echo "let it begin another story:"
	@echo "  $(BIN)/shardwise generate runs/quickstart --prompt 'Once upon a time there was a little bear named Ruby.'"
	@echo "docs/configs.md has how to fine-tune a model of your own."
	@$(BIN)/shardwise train quickstart

# Three files of tests at a time, the longest first, each with ranks of its own: tests wait for ranks as much as they work.
# Plain pytest runs one. A process of tests that dies ends them all: pytest-xdist 3.8 replaces it and may then wait for ever
# (its issues 1323, 1327 and 1378).
PYTEST := $(BIN)/python -m pytest --dist loadfile --no-loadscope-reorder --max-worker-restart 0
WHOLE := $(PYTEST) -n 3 --durations 25 --ignore tests/integrations

# In less than a minute, while you work on the engine: what it and the layers below it need no ranks for.
WITHOUT_RANKS := $(addprefix tests/,layout policy comm files sharded engine modules optim test_layers.py test_first_reading.py)

check: setup
	$(PYTEST) -n 2 -m "not slow and not ranks" $(WITHOUT_RANKS)

test: setup
	$(WHOLE) -m "not slow and not exhaustive"

# Those that take more than ten seconds each: runs that are killed again and again, scripts of benchmarks, whole searches.
test-slow: setup
	$(WHOLE) -m "slow and not exhaustive"

# The rest of the grids, of which those above take each value at least once: places of offload by programs, architectures by
# strategies (tests/conftest.py).
test-exhaustive: setup
	$(WHOLE) -m exhaustive

# Beside the libraries that people bring, which it installs.
test-integrations: setup-integrations
	$(PYTEST) -n 2 tests/integrations

setup-integrations: $(VENV)/.integrations-done

$(VENV)/.integrations-done: $(STAMP)
	@$(PIP) --quiet -e '.[dev-integrations]'
	@touch $@

# Known vulnerabilities of the versions in constraints.txt, as PyPI lists them today. Not part of CI: the answer changes
# without a commit.
audit: setup
	@test -x .venv-audit/bin/pip-audit || { $(PYTHON) -m venv .venv-audit && .venv-audit/bin/pip install --quiet pip-audit; }
	@.venv-audit/bin/pip-audit -r constraints.txt --no-deps --disable-pip

# The site of docs/, in site/: `make site && .venv/bin/python -m http.server -d site`. Any warning ends it.
site: setup-docs
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict
	@echo "site/index.html"

setup-docs: $(VENV)/.docs-done

$(VENV)/.docs-done: $(STAMP)
	@$(PIP) --quiet -e '.[docs]'
	@touch $@

# Tests with another release of torch or of Python, in an environment of its own, named by both:
# make test-torch TORCH=2.15.0 PYTHON=python3.12 TESTS=tests/engine
# Other builds than the pinned one may bring gigabytes of CUDA's libraries along.
TESTS ?= tests/sharded tests/comm tests/modules tests/optim tests/engine tests/compat tests/parity tests/offload tests/model_tools
OTHER = .venv-torch-$(TORCH)-py$(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
test-torch:
	@test -n "$(TORCH)" || { echo "say which: make test-torch TORCH=2.15.0" >&2; exit 2; }
	@test -x $(OTHER)/bin/python || $(PYTHON) -m venv $(OTHER)
	@$(OTHER)/bin/python -m pip install --quiet torch==$(TORCH)
	@grep -v -e '^torch==' -e '^setuptools==' constraints.txt > $(OTHER)/constraints.txt
	@$(OTHER)/bin/python -m pip install --quiet -c $(OTHER)/constraints.txt torch==$(TORCH) -e '.[train,dev]'
	$(OTHER)/bin/python -m pytest -n 2 --dist loadfile --max-worker-restart 0 -m "not slow and not exhaustive" $(TESTS)

# What one accelerator can tell, in nine minutes at most: with $(PYTHON) if its torch sees one, or has torch where there is
# no virtual environment, else with that, made first if need be. `make gpu ARGS='--only parity'`
gpu:
	@test -x $(BIN)/python || $(PYTHON) -c 'import torch' 2>/dev/null || $(MAKE) setup
	@python=$(PYTHON); if test -x $(BIN)/python && \
		! $(PYTHON) -c 'import sys, torch; sys.exit(not torch.accelerator.is_available())' 2>/dev/null; \
		then python=$(BIN)/python; fi; $$python benchmarks gpu $(ARGS)

# The engine's tests on this machine's accelerators, a rank on each: those for more ranks than there are devices skip. It
# needs a virtual environment whose torch sees them. `make test-gpu DEVICE=xpu TESTS=tests/engine/dtypes`
DEVICE ?= cuda
test-gpu: TESTS = tests/engine tests/sharded tests/optim tests/offload
test-gpu: setup
	SHARDWISE_TEST_DEVICE=$(DEVICE) $(BIN)/python -m pytest -m "ranks and not slow" $(TESTS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) .venv-torch-* .venv-audit site .mypy_cache .pytest_cache .ruff_cache
