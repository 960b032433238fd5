# Two commands matter: `make demo` and `make test`. Both need only Python 3.10 or newer.
PYTHON ?= python3

.PHONY: help demo test lint clean
.DEFAULT_GOAL := help

help:  ## this list
	@sed -n 's/^\([a-z]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST)

demo:  ## the operator inside a real model, on real text (ARGS="--device cuda" and the like)
	@python="$$($(PYTHON) tools/environment.py demo)" || exit; \
	PYTHONPATH="src$${PYTHONPATH:+:$$PYTHONPATH}" "$$python" -m dsv4_prologue demo $(ARGS)

test:  ## every check there is; SESSION=unit runs one (nox --list names them)
	@python="$$($(PYTHON) tools/environment.py test)" || exit; rm -rf .nox/junit; \
	"$$python" -m nox $(if $(SESSION),--session "$(SESSION)"); status=$$?; \
	"$$python" tools/tally.py; exit $$status

lint:  ## ruff and mypy only
	@python="$$($(PYTHON) tools/environment.py test)" || exit; \
	"$$python" -m nox --session lint types

clean:  ## remove environments, caches and builds
	rm -rf .venv .venv-host .nox build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
