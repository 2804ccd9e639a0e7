# Every target sets up what it needs: the first call installs, later ones start at once.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
NEWEST_VENV := .venv-newest
# A worker takes tests that stand beside each other: these share executables.
PYTEST := $(BIN)/python -m pytest -n 2 --dist worksteal

.PHONY: demo test test-all test-golden lint bench docs clean

demo: $(VENV)/.demo
	$(BIN)/python -m jspec demo

test: $(VENV)/.test
	JSPEC_TEST_QUICK=1 $(PYTEST) -m 'not gpu and not slow'
	@PYTHON="$(BIN)/python" VENV="$(NEWEST_VENV)" .ci/test-newest

# With the slow repetitions, compiled as users compile, and the check that a changed recording is
# seen.
test-all: $(VENV)/.test
	$(PYTEST)
	$(BIN)/python -m tests.mutations

# All tests that compare with recordings: `JSPEC_GOLDEN=DIR make test-golden` takes those in DIR.
test-golden: $(VENV)/.test
	JSPEC_TEST_QUICK=1 $(PYTEST) -m 'recorded and not gpu'

# torch_bridge needs PyTorch to be checked, which is not installed everywhere (see pyproject.toml).
lint: $(VENV)/.test
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright $$($(BIN)/python -c \
	  'import importlib.util as u; print("" if u.find_spec("torch") else "jspec")')

bench: $(VENV)/.demo
	$(BIN)/python benchmarks/decode.py

docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean:
	rm -rf $(VENV) $(NEWEST_VENV) .cache site

# pip, not python: a venv that failed for want of ensurepip has a python already.
$(BIN)/pip:
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("$(PYTHON) is Python " \
	  "%d.%d, wanted 3.11 or newer: make PYTHON=python3.12" % sys.version_info[:2])'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip

$(VENV)/.%: pyproject.toml | $(BIN)/pip
	$(BIN)/python -m pip install --quiet --editable '.[$*]'
	@touch $@
