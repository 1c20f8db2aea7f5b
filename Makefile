# Needs make and a Python of 3.11 or newer that can make virtual environments; everything else is installed into
# .venv in this folder. `make help` lists the targets.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

# The newest jax minor that the suite was run against is below this bound.
NEWEST_JAX ?= jax<0.13
# As many test processes as the suite is tuned for; PYTEST_ARGS="-n 8 --dist worksteal" for a larger machine. Each takes
# whole files, whose fixtures are then made once, until one has none left and takes half of what another has.
PYTEST_ARGS ?= -n 2 --dist worksteal

VENV := .venv
NEWEST := .venv-newest
PUBLIC := .venv-public
BROWSER := .venv-browser
AOT := .venv-aot
DOCS := .venv-docs
comma := ,
LOCKS := $(wildcard requirements/*.txt requirements/*.in)
RUN_EXTRAS := examples,checkpoint,metrics,tls

# Prints every Python that works, one "3.x path" a line. A name on the PATH may be a launcher of a version manager
# that does not start, or a Python without ensurepip, hence the trial run.
define PYTHONS
for p in python3.11 python3.12 python3.13 python3.14 python3 \
    "$$HOME"/.pyenv/versions/3.1[1-9]*/bin/python3; do \
  "$$p" -c 'import sys, ensurepip, venv; v = sys.version_info; assert v >= (3, 11); \
print(f"{v.major}.{v.minor}", getattr(sys, "_base_executable", None) or sys.executable)' 2>/dev/null || true; \
done
endef

# 3.11 where there is one (the oldest that is supported, so the one that finds what is too new), else the newest.
PYTHON ?= $(shell { $(PYTHONS); } | sort -s -t. -k2,2n | awk '{ if ($$1 == "3.11" && !f) f = $$2; last = $$2 } \
  END { print f ? f : last }')
NEWEST_PYTHON ?= $(shell { $(PYTHONS); } | sort -s -t. -k2,2n | awk '{ last = $$2 } END { print last }')

# install(environment, extras, further): with the exact versions of the lock for its Python where there is one.
define install
lock="requirements/$$($(1)/bin/python -c 'import sys; print("py%d%d" % sys.version_info[:2])').txt"; \
pins=(); if [[ -f $$lock ]]; then pins=(-c "$$lock"); else echo "no $$lock: taking the newest versions"; fi; \
$(1)/bin/python -m pip --version >/dev/null 2>&1 || $(1)/bin/python -m ensurepip >/dev/null; \
$(1)/bin/python -m pip install --quiet --disable-pip-version-check $${pins[@]+"$${pins[@]}"} hatchling editables; \
$(1)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile $${pins[@]+"$${pins[@]}"} \
  --no-build-isolation -e '.[$(2)]' $(3); \
$(1)/bin/python -m compileall -q -j 2 $(1)/lib >/dev/null || true
endef

.PHONY: help
help:  ## list the targets
	@sed -nE 's/^([a-z-]+):.*## (.*)/make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 20

$(VENV)/bin/python:
	@test -n "$(PYTHON)" || { echo "No usable Python of 3.11 or newer was found. Install one with its venv and" \
	  "ensurepip modules, or name it: make PYTHON=/path/to/python3.11 ..." >&2; exit 1; }
	@echo "making $(VENV) with $(PYTHON)"
	@"$(PYTHON)" -m venv --clear $(VENV)

$(VENV)/.run-stamp: pyproject.toml $(LOCKS) | $(VENV)/bin/python
	@echo "installing autopar into $(VENV)"
	@$(call install,$(VENV),$(RUN_EXTRAS))
	@$(VENV)/bin/python -m autopar.solver.prepare
	@touch $@

$(VENV)/.dev-stamp: pyproject.toml $(LOCKS) | $(VENV)/bin/python
	@echo "installing autopar and its development tools into $(VENV)"
	@$(call install,$(VENV),$(RUN_EXTRAS),-r requirements/dev.in)
	@touch $@ $(VENV)/.run-stamp

.PHONY: demo
demo: $(VENV)/.run-stamp  ## train a small GPT on 8 virtual devices, with and without autopar
	@$(VENV)/bin/python -m examples.demo

.PHONY: demo-ray
demo-ray: $(VENV)/.run-stamp  ## train a pipeline on two workers of Ray, and kill one of them on the way
	@$(VENV)/bin/python -m examples.demo_ray

.PHONY: demo-hosts
demo-hosts: $(VENV)/.run-stamp  ## train by one script in two processes, and kill one of them on the way
	@$(VENV)/bin/python -m examples.demo_hosts

.PHONY: lint
lint: $(VENV)/.dev-stamp  ## the static checks alone
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports
	$(VENV)/bin/python -m tests.sizes

# Loops are compiled and the static checks run while test processes collect: a minute of one core. Bytecode is written,
# and that of the package ahead: else each process of the tests, and each that a test starts, would compile all of it.
.PHONY: test
test: export PYTHONDONTWRITEBYTECODE :=
test: $(VENV)/.dev-stamp  ## static checks and all tests but the slow ones
	@$(VENV)/bin/python -m compileall -q -j 2 autopar benchmarks examples
	@{ $(VENV)/bin/python -m autopar.solver.prepare && $(MAKE) --no-print-directory lint; } & checks=$$!; tests=0; \
	  $(VENV)/bin/python -m pytest $(PYTEST_ARGS) || tests=$$?; \
	  wait $$checks || { echo "a static check failed; make lint shows it alone" >&2; exit 1; }; exit $$tests

.PHONY: test-all
test-all: lint  ## static checks and all tests, the slow ones too: about three hours on two cores
	$(VENV)/bin/python -m pytest $(PYTEST_ARGS) -m "slow or not slow" --ignore tests/public

.PHONY: mutations
mutations: $(VENV)/.dev-stamp  ## faults put in one at a time, and the tests that catch them: half an hour of one core
	$(VENV)/bin/python -m tests.mutations

# Without SHARD the part that the commit's hash chooses, as continuous integration does. Tests that have not ended after
# SHARD_MINUTES are left to another commit, whose hash draws another order.
SHARD_MINUTES ?= 20
.PHONY: test-shard
test-shard: $(VENV)/.dev-stamp  ## one of the eight parts of the slow tests: make test-shard SHARD=3
	@$(VENV)/bin/python -m tests.shards --minutes $(SHARD_MINUTES) $(SHARD_ARGS) $(SHARD)

.PHONY: test-slow
test-slow: $(VENV)/.dev-stamp  ## the slow tests
	$(VENV)/bin/python -m pytest -m slow

$(PUBLIC)/.stamp: pyproject.toml requirements/public.in
	@test -n "$(PYTHON)" || { echo "No usable Python of 3.11 or newer was found." >&2; exit 1; }
	@"$(PYTHON)" -m venv --clear $(PUBLIC)
	@$(PUBLIC)/bin/python -m pip install --quiet --disable-pip-version-check -e . -r requirements/public.in \
	  hypothesis pytest pytest-benchmark pytest-randomly pytest-timeout
	@touch $@

# An environment of its own: these packages want other versions of things than the development tools do.
.PHONY: test-public
test-public: $(PUBLIC)/.stamp  ## train steps of released packages (docs/public-steps.md); an hour on two cores
	$(PUBLIC)/bin/python -m pytest -m "slow or not slow" tests/public

# Some of them: SUITES="optax chex". Reports are in build/suites.
.PHONY: test-suites
test-suites: $(PUBLIC)/.stamp  ## test suites of released packages with jax.jit replaced by autopar; hours on two cores
	$(PUBLIC)/bin/python -m tests.public.suites $(SUITES)

$(BROWSER)/.stamp: pyproject.toml
	@test -n "$(PYTHON)" || { echo "No usable Python of 3.11 or newer was found." >&2; exit 1; }
	@"$(PYTHON)" -m venv --clear $(BROWSER)
	@$(call install,$(BROWSER),metrics,-r requirements/browser.in)
	@$(BROWSER)/bin/python -m pip install --quiet --disable-pip-version-check \
	  hypothesis pytest pytest-benchmark pytest-randomly pytest-timeout
	@touch $@

# An environment of its own, for the engine of a browser takes half a gigabyte. It needs no display.
.PHONY: test-browser
test-browser: $(BROWSER)/.stamp  ## the pages of plans in the engine of a browser
	$(BROWSER)/bin/python -m pytest tests/report/test_browser.py

# Resolves again on every call: what is newest changes without a change here.
.PHONY: test-newest
test-newest:  ## the tests with the newest Python and jax
	@test -n "$(NEWEST_PYTHON)" || { echo "No usable Python of 3.11 or newer was found." >&2; exit 1; }
	@want="$$("$(NEWEST_PYTHON)" -V)"; have="$$($(NEWEST)/bin/python -V 2>/dev/null || true)"; \
	  [[ $$want == "$$have" ]] || "$(NEWEST_PYTHON)" -m venv --clear $(NEWEST)
	@$(NEWEST)/bin/python -m pip install --quiet --disable-pip-version-check --upgrade \
	  --upgrade-strategy eager '$(NEWEST_JAX)' -e '.[$(RUN_EXTRAS)]' -r requirements/dev.in
	@$(NEWEST)/bin/python -c 'import sys, jax, pulp; \
	  print("Python %d.%d.%d," % sys.version_info[:3], "jax", jax.__version__ + ", PuLP", pulp.__version__)'
	$(NEWEST)/bin/python -m pytest $(PYTEST_ARGS)

# One lock for each Python on this machine; those of other versions stay as they are.
.PHONY: lock
lock:  ## write requirements/pyXY.txt again from pyproject.toml
	@tmp="$$(mktemp -d)"; trap 'rm -rf "$$tmp"' EXIT; \
	  { $(PYTHONS); } | sort -u -t' ' -k1,1 | while read -r version python; do \
	    tag="py$${version/./}"; \
	    "$$python" -m venv "$$tmp/$$tag"; \
	    "$$tmp/$$tag/bin/python" requirements/lock.py "requirements/$$tag.txt" '$(NEWEST_JAX)'; \
	  done

.PHONY: bench
bench: $(VENV)/.dev-stamp  ## run the benchmarks
	$(VENV)/bin/python -m benchmarks

$(AOT)/.stamp: pyproject.toml $(LOCKS)
	@test -n "$(PYTHON)" || { echo "No usable Python of 3.11 or newer was found." >&2; exit 1; }
	@"$(PYTHON)" -m venv --clear $(AOT)
	@$(call install,$(AOT),examples$(comma)tpu$(comma)cuda12-aot)
	@touch $@

# An environment of its own, with XLA's compilers for TPU and GPU: jax looks for such devices where they are installed.
# Some of it: VERIFY_ARGS="--targets cuda:h100:1x8 --examples mlp,gpt".
.PHONY: verify
verify: $(AOT)/.stamp  ## predicted collectives and memory against XLA's compilers for TPU and GPU
	TPU_SKIP_MDS_QUERY=1 JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 JAX_PLATFORMS=cpu $(AOT)/bin/python -m benchmarks verified $(VERIFY_ARGS)

# Goes on where it stopped. FUZZ_ARGS="--seconds 600", "--plans 4", "--seed 1"; `python -m tests.fuzz --help`.
FUZZ_PROGRAMS ?= 5000
.PHONY: fuzz
fuzz: $(VENV)/.dev-stamp  ## run random programs planned and plain, and compare; hours, goes on where it stopped
	$(VENV)/bin/python -m tests.fuzz --programs $(FUZZ_PROGRAMS) --out .fuzz --resume $(FUZZ_ARGS)

$(DOCS)/.stamp: pyproject.toml
	@test -n "$(PYTHON)" || { echo "No usable Python of 3.11 or newer was found." >&2; exit 1; }
	@"$(PYTHON)" -m venv --clear $(DOCS)
	@$(DOCS)/bin/python -m pip install --quiet --disable-pip-version-check \
	  'mkdocs-material>=9.6,<10' 'mkdocstrings[python]>=0.29' 'ruff>=0.9'
	@touch $@

# Nothing of autopar is installed there: the reference is read from the source.
.PHONY: docs
docs: $(DOCS)/.stamp  ## build the documentation into build/site, and the lessons as notebooks into build/notebooks
	PATH="$(CURDIR)/$(DOCS)/bin:$$PATH" NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict -q -f docs/site/mkdocs.yml
	$(DOCS)/bin/python docs/site/notebooks.py build/notebooks

.PHONY: coverage-page
coverage-page: $(VENV)/.dev-stamp  ## write docs/coverage.md again
	$(VENV)/bin/python -m docs.coverage

.PHONY: clean
clean:  ## remove the environments and all caches
	rm -rf $(VENV) $(NEWEST) $(PUBLIC) $(BROWSER) $(AOT) $(DOCS) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache .jax_cache \
	  .benchmarks
	find autopar benchmarks examples requirements tests -name __pycache__ -type d -prune -exec rm -rf {} +
