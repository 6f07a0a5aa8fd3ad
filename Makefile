# Commands for users: `make demo`, `make test`, and `make bench`, which trains side by side with what else there is.
# All set up .venv first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test bench check clean

$(VENV)/installed: pyproject.toml constraints.txt
	@echo "setting up $(VENV): a few minutes, once"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip setuptools wheel
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[pack,export,recipes,dev]"
	touch $@

demo: $(VENV)/installed
	PATH="$(CURDIR)/$(BIN):$$PATH" dev/demo

test: $(VENV)/installed
	PYTHON=$(BIN)/python dev/test

bench: $(VENV)/installed
	$(BIN)/python -m benchmarks.compare $(TASKS)

check: $(VENV)/installed
	PYTHON=$(BIN)/python dev/check

clean:
	rm -rf demo $(VENV)
