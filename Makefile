PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.setup-done
PIP := $(BIN)/python -m pip install --quiet -c constraints.txt

.PHONY: setup setup-integrations train test test-integrations gpu lint clean

setup: $(STAMP)

# torch first: packages that look for it while they are built must find the pinned one.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "shardwise needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) --version 2>&1). Run: make setup PYTHON=python3.11" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) torch==2.13.0
	$(PIP) -e '.[train,dev]'
	@touch $@

train: setup
	$(BIN)/shardwise train recipes/quickstart.toml

# Three files of tests at a time, the longest first, each with ranks of its own: tests wait for ranks as much as they work.
# Plain pytest runs one.
test: setup
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder --durations 25 --ignore tests/integrations

# Beside the libraries that people bring, which it installs.
test-integrations: setup-integrations
	$(BIN)/python -m pytest -n 2 --dist loadfile tests/integrations

setup-integrations: $(VENV)/.integrations-done

$(VENV)/.integrations-done: $(STAMP)
	$(PIP) -e '.[dev-integrations]'
	@touch $@

# What one accelerator can tell, in nine minutes at most: with $(PYTHON) if its torch sees one, or has torch where there is
# no virtual environment, else with that, made first if need be. `make gpu ARGS='--only parity'`
gpu:
	@test -x $(BIN)/python || $(PYTHON) -c 'import torch' 2>/dev/null || $(MAKE) setup
	@python=$(PYTHON); if test -x $(BIN)/python && \
		! $(PYTHON) -c 'import sys, torch; sys.exit(not torch.accelerator.is_available())' 2>/dev/null; \
		then python=$(BIN)/python; fi; $$python benchmarks/gpu.py $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache
