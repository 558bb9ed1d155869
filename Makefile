# Each target sets up what it needs: the first one takes about three minutes, later ones start at once.
BIN := .venv/bin
# Further arguments: make quickstart ARGS="--task sums --seed 1", make test ARGS="tests/cli -x"
ARGS ?=

.PHONY: help setup quickstart test test-kernels lint format types proto settings generated-check clean

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 14

setup:  ## make the virtual environment, with the vLLM build that fits this machine
	@python3 scripts/bootstrap.py

quickstart: setup  ## train a small real model through the whole service, in minutes
	$(BIN)/qerld quickstart $(ARGS)

# Two workers: the tests wait for processes to start as long as they compute. A file stays on one worker, whose engine it
# shares. The whole run is faster, a single file is not: .venv/bin/pytest FILE.
test: setup  ## run the tests that need neither a GPU nor minutes each
	$(if $(ARGS),,@$(MAKE) --no-print-directory test-kernels)
	$(BIN)/pytest -n 2 --dist loadfile $(ARGS)

# On a GPU, where Triton is beside vLLM, `make test` runs them compiled.
test-kernels: setup  ## run the Triton kernels on the CPU, operation by operation
	TRITON_INTERPRET=1 PYTHONPATH=.venv/interpreter $(BIN)/pytest -n 2 tests/kernels_triton

lint: setup  ## check style and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: setup  ## mend style and formatting
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: setup  ## check types
	$(BIN)/mypy

proto: setup  ## generate the code of proto/
	PATH="$(CURDIR)/$(BIN):$$PATH" scripts/proto.sh

settings: setup  ## write docs/settings.md from the settings
	scripts/settings_doc.sh

generated-check: proto settings  ## check that what is committed is what is generated, and lint the API
	git diff --exit-code -- proto docs/settings.md
	scripts/buf.sh lint

clean:  ## remove what was built or downloaded here, the environment and caches included; runs/ stays
	rm -rf .venv .cache .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
