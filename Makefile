# Two commands need nothing but make and a Python: `make serve` and `make test`. `make help` lists the others.

VENV := .venv
BIN := $(VENV)/bin
# What is installed besides kimijax itself; on a GPU machine `make serve EXTRAS=cuda12`.
EXTRAS ?= dev
ARGS ?=
HOST ?= 127.0.0.1
PORT ?= 30000
# One stamp for each choice of extras, so that changing it installs what is new.
STAMP := $(VENV)/.installed-$(EXTRAS)
DEV_STAMP := $(VENV)/.installed-dev

.DEFAULT_GOAL := help
.PHONY: help venv serve test test-slow bench format clean

help:
	@echo 'make serve      install, then serve kimi-nano at http://$(HOST):$(PORT)'
	@echo 'make test       install, then format check, lint, types and tests'
	@echo 'make test-slow  the tests that take minutes'
	@echo 'make bench      measure offline throughput; ARGS="--batch 1,8 --json"'
	@echo 'make format     rewrite the code as the format check wants it'
	@echo 'make venv       only install, into $(VENV)'
	@echo 'make clean      remove $(VENV) and what the tools cache'
	@echo
	@echo 'PYTHON=/path/to/python chooses the interpreter; EXTRAS=cuda12 (or cuda13) installs JAX for a GPU;'
	@echo 'HOST, PORT and ARGS="--model-path DIR ..." go to the server.'

venv: $(STAMP)

serve: $(STAMP)
	$(BIN)/python -m kimijax.serve --host $(HOST) --port $(PORT) $(ARGS)

# JAX_PLATFORMS is set here, not only in tests/conftest.py, so that an image that sets it to its GPU changes nothing.
test: $(DEV_STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	JAX_PLATFORMS=cpu $(BIN)/python -m pytest $(ARGS)

test-slow: $(DEV_STAMP)
	JAX_PLATFORMS=cpu $(BIN)/python -m pytest -m slow $(ARGS)

bench: $(STAMP)
	$(BIN)/python -m kimijax.bench offline $(ARGS)

format: $(DEV_STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) build dist kimijax.egg-info .pytest_cache .ruff_cache .hypothesis
	find kimijax pallas_kernels serve train tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

# A Python counts if it runs, is new enough and can make a virtual environment: pyenv's shims fail when their version
# is not selected, and Debian splits venv off into a package of its own.
USABLE := import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 12))

$(VENV)/.installed-%: pyproject.toml
	@set -eu; \
	if ! $(BIN)/python -c '$(USABLE)' 2>/dev/null; then \
	    python=; \
	    if [ -n '$(PYTHON)' ]; then candidates='$(PYTHON)'; else \
	        pyenv="$${PYENV_ROOT:-$${HOME:-}/.pyenv}/versions"; candidates=; \
	        for version in 3.12 3.13 3.14; do \
	            candidates="$$candidates python$$version $$(ls -d "$$pyenv/$$version".*/bin/python 2>/dev/null | sort -r || true)"; \
	        done; \
	        candidates="$$candidates python3"; \
	    fi; \
	    for candidate in $$candidates; do \
	        if "$$candidate" -c '$(USABLE)' 2>/dev/null; then python="$$candidate"; break; fi; \
	    done; \
	    if [ -z "$$python" ]; then \
	        echo 'make: kimijax needs Python 3.12 or newer with its venv module. None of these is that:' >&2; \
	        for candidate in $$candidates; do echo "    $$candidate" >&2; done; \
	        echo 'Install one and run make again:' >&2; \
	        echo '    Debian, Ubuntu   apt install python3.12 python3.12-venv   (3.13: python3.13 python3.13-venv)' >&2; \
	        echo '    Fedora           dnf install python3.12' >&2; \
	        echo '    macOS            brew install python@3.12' >&2; \
	        echo '    pyenv            pyenv install 3.12' >&2; \
	        echo 'or name one: make PYTHON=/path/to/python ...' >&2; \
	        exit 1; \
	    fi; \
	    echo "make: $(VENV) is made with $$("$$python" -c 'import sys; print(sys.executable, sys.version.split()[0])')"; \
	    "$$python" -m venv --clear $(VENV); \
	fi
	$(BIN)/python -m pip install $(if $(CI),--quiet) --disable-pip-version-check --editable '.[$*]'
	@touch $@
