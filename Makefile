# Commands for a checkout. Everything is installed into .venv; `make clean` removes it.
#
# PYTHON: the interpreter to use, 3.10 or newer; one that is named has an environment of its own, such as .venv-3.13.
# PYTHONS: the interpreters of `make pythons`, by default all that are found; PYTHONS=--ends: the oldest and the newest.
# STRICT=--strict: `make test` and `make pythons` fail when a test is skipped.

PYTHON ?= python3
PYTHONS ?=
STRICT ?=
ifeq ($(origin PYTHON),file)
VENV := .venv
else
VENV := .venv-$(shell $(PYTHON) -c 'import sys; print("%d.%d%s" % (*sys.version_info[:2], sys.abiflags))')
endif
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

# A stamp file shows what is installed, so that pip runs again only when pyproject.toml or constraints.txt changes.
RUN_STAMP := $(VENV)/.installed-run
DEV_STAMP := $(VENV)/.installed-dev
GALLERY_STAMP := $(VENV)/.installed-gallery

.DEFAULT_GOAL := help
.PHONY: help demo quick test test-gpu pythons soak check bench bench-scale bench-ssh bench-slurm bench-hangs docs clean

help: ## list these commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(RUN_STAMP) ## train a small GPT on two nodes with two ranks each, all on this machine (a minute or two)
	$(BIN)/orch submit jobs/tiny_gpt.yaml --follow

quick: $(DEV_STAMP) ## less than a minute: ruff, mypy, and the tests that start no process
	@$(BIN)/python -m tests.run quick

test: $(DEV_STAMP) ## a quarter of an hour: every check and test except the longest; as root it installs what they need with apt
	@tests/install.sh
	@$(BIN)/python -m tests.run test $(STRICT)

test-gpu: $(DEV_STAMP) ## less than five minutes: what only an NVIDIA GPU can show; without one it says so. ORCH_GPU_TESTS=cpu tries it on CPUs
	@$(BIN)/python -m tests.gpu

pythons: $(DEV_STAMP) ## the quick tests and whole jobs on each Python that is found (PYTHONS="python3.10 …"); some minutes each
	@$(BIN)/python -m tests.pythons $(STRICT) $(PYTHONS)

soak: $(GALLERY_STAMP) ## hours: what `make test` leaves out, whole galleries, a million nights, and all that is slow 20 times
	@tests/install.sh
	@$(BIN)/python -m tests.run soak

check: $(DEV_STAMP) ## ruff, ruff format, and mypy for the oldest and the newest Python
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy --python-version 3.14

bench: $(DEV_STAMP) ## measure what the design promises, as ratios; needs a quiet machine
	$(BIN)/python bench/run.py
	$(BIN)/python -m bench.starts
	$(BIN)/python -m bench.eyes
	$(BIN)/python -m bench.hang_rule
	$(BIN)/python -m bench.checkpoints
	$(BIN)/python -m bench.goodput
	$(BIN)/python -m bench.revival
	$(BIN)/python -m bench.scale
	$(BIN)/python -m bench.ssh
	$(BIN)/python -m bench.slurm

bench-ssh: $(DEV_STAMP) ## the part of bench on a cluster in a box of up to 128 hosts; needs root
	$(BIN)/python -m bench.ssh

bench-slurm: $(DEV_STAMP) ## the part of bench on a Slurm cluster in a box; needs root
	$(BIN)/python -m bench.slurm

bench-scale: $(DEV_STAMP) ## the part of bench on large jobs: a real supervisor, up to 1,000 nodes that stand-ins play (five minutes)
	$(BIN)/python -m bench.scale

bench-hangs: $(DEV_STAMP) ## measure how soon each hang of the gallery is found, one by one (half an hour)
	$(BIN)/python -m bench.hang_gallery

docs: $(DEV_STAMP) ## write the generated parts of docs/
	$(BIN)/python docs/generate.py

clean: ## remove .venv and its like, builds and caches; jobs in ~/.orch stay
	rm -rf .venv .venv-* build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) was not found; name another: make PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo "$(PYTHON) is `$(PYTHON) -V 2>&1`, and 3.10 is needed; name another: make PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "$(PYTHON) has no venv or no pip; on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(RUN_STAMP): pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing orch and torch into $(VENV): a few minutes"
	$(INSTALL) -e '.[torch]'
	@touch $@

$(DEV_STAMP): pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) -e '.[dev]'
	@touch $(RUN_STAMP) $@

$(GALLERY_STAMP): pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) -e '.[dev,gallery]'
	@touch $(RUN_STAMP) $(DEV_STAMP) $@
