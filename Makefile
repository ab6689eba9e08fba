# Two commands, each sufficient on a fresh CPU machine with Python 3.11, pip and make:
#   make demo    serve requests with a real SGLang engine under the canary, then catch injected faults
#   make test    run the tests; `make test ARGS="-k ring -x"` passes arguments to pytest
# Both set up $(VENV) first, and again only when a pin, pyproject.toml, setup.py or the stand-in changes.
#
# Variables
#   SGLANG           release that demo and test run with: 0.5.12.post1 (default), or 0.5.17 to 0.5.23; each has its own $(VENV)
#   PYTHON           interpreter that creates $(VENV); default: the first Python 3.11 found
#   JOBS             test files that run at a time; default 3, for 2 cores: servers often wait for each other
#   FULL             1: tests send as many requests as docs/testing.md counts; by default, what each path needs
#   TORCH_INDEX_URL  set to https://download.pytorch.org/whl/cpu where plain PyPI's torch brings CUDA packages

BASE_SGLANG = 0.5.12.post1
SGLANG ?= $(BASE_SGLANG)
# `make hooks` takes a folder.
RELEASE = $(if $(findstring /,$(SGLANG)),$(BASE_SGLANG),$(SGLANG))
VENV ?= .venv$(if $(filter-out $(BASE_SGLANG),$(RELEASE)),-$(RELEASE))
JOBS ?= 3
FULL ?=
TORCH_INDEX_URL ?=
ARGS ?=
PYTHON = $(shell for python in python3.11 python3 python; do \
	$$python -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null \
	&& echo $$python && break; done)

PIP_FLAGS = --quiet --disable-pip-version-check
# Bytecode is made of what is imported, at the first import: a third of the files. To make all of it takes half of a setup.
PIP_INSTALL = $(VENV)/bin/python -m pip install $(PIP_FLAGS) --no-warn-conflicts --no-compile
SHIM = tools/cpu_sgl_kernel
DOCS_NEEDS = requirements/docs.txt
SGLANG_NEEDS = requirements/sglang-$(RELEASE).txt
ENGINE_NEEDS = requirements/torch.txt requirements/cpu.txt requirements/dev.txt $(SGLANG_NEEDS)
SHIM_FILES = $(wildcard $(SHIM)/pyproject.toml $(SHIM)/sgl_kernel/*.py)
DEPS_STAMP = $(VENV)/.stamp-deps
READY_STAMP = $(VENV)/.stamp-ready
DOCS_STAMP = $(VENV)/.stamp-docs
# One OpenMP thread: more of them fight for the cores with the engine's own processes. Bytecode is kept, also where
# the machine says otherwise: each of several hundred processes would compile our package anew.
ENGINE_ENV = OMP_NUM_THREADS=1 SGLANG_USE_CPU_ENGINE=1 PYTHONDONTWRITEBYTECODE=
ifneq ($(filter-out 0 1,$(FULL)),)
$(error FULL=$(FULL) is neither 1 nor 0: use FULL=1 for all requests and examples)
endif
VOLUME_ENV = $(if $(filter 1,$(FULL)),KV_CANARY_TEST_FULL_VOLUME=1)

.PHONY: help demo test hooks mutants sanitize lint format docs wheel setup deps prometheus transport clean
.DELETE_ON_ERROR:

help:
	@sed -n 's/^#   \(make .*\)/\1/p' Makefile
	@echo 'also: make hooks SGLANG=FOLDER; make setup | lint | format | docs | mutants | sanitize | wheel | prometheus | transport | clean'

demo: $(READY_STAMP)
	@$(ENGINE_ENV) $(VENV)/bin/kv-canary demo $(ARGS)

# Files in the order of conftest.py: the longest come first, and the short ones fill the cores at the end.
test: $(READY_STAMP)
	@$(ENGINE_ENV) $(VOLUME_ENV) $(VENV)/bin/python -m pytest -q -n $(JOBS) --dist loadfile --no-loadscope-reorder $(ARGS)

# Not a part of `make test`: about 20 minutes on 2 cores. ARGS="--only NAME" takes the mutants of some files only.
mutants: $(READY_STAMP)
	@$(ENGINE_ENV) PYTHONPATH=tools $(VENV)/bin/python -W ignore -m mutation_testing --jobs $(JOBS) $(ARGS)

# Not a part of `make test`: the C code under gcc's sanitizers in real servers, too. ARGS="FILE ..." takes other tests.
SANITIZED = $(addprefix test/registered/kv_canary/,runner/test_host_code.py wiring/test_direct_hooks.py \
	$(patsubst %,e2e/test_e2e_%.py,mha_raise sweep sessions hicache disaggregation_nixl))
sanitize: $(READY_STAMP)
	@$(ENGINE_ENV) tools/sanitized.sh $(VENV)/bin/python -m pytest -q -p no:cacheprovider $(or $(ARGS),$(SANITIZED))

# SGLANG is a folder here, which holds sglang/: for example an unzipped wheel. Its source is read, never imported.
hooks: $(READY_STAMP)
	@$(ENGINE_ENV) $(VENV)/bin/python -W ignore tools/hook_targets.py $(SGLANG) $(ARGS)

lint: $(READY_STAMP)
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/ruff format --check .

format: $(READY_STAMP)
	@$(VENV)/bin/ruff check --fix .
	@$(VENV)/bin/ruff format .

# The documents as a site, in build/site. A dead link, a dead anchor or a page that is in no menu fails.
docs: $(DOCS_STAMP)
	@NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --clean --strict
	@echo build/site/index.html

wheel: $(READY_STAMP)
	@$(VENV)/bin/python -m pip wheel $(PIP_FLAGS) --no-deps --no-build-isolation -w dist .
	@ls dist/*.whl

setup: $(READY_STAMP)

# The longest part of setup, which writes to $(VENV) only: two of them may run at a time.
deps: $(DEPS_STAMP)

# Prometheus 2 and 3 for the tests that run one; without it they are skipped.
prometheus:
	@tools/fetch_prometheus.sh .prometheus

# What the Mooncake transport links to, for the tests of prefill-decode disaggregation; without it they are skipped.
transport:
	@tools/fetch_transport.sh .transport

clean:
	rm -rf build dist $(SHIM)/build

# --without-pip and the outer pip: works without ensurepip too, which Debian packages apart.
$(VENV)/bin/pip:
	@test -n "$(PYTHON)" || { echo 'no Python 3.11 found; install it, or set PYTHON=/path/to/python3.11' >&2; exit 1; }
	@echo "[setup 1/4] creating $(VENV)"
	@$(PYTHON) -m venv --without-pip $(VENV)
	@$(PYTHON) -m pip --python $(VENV)/bin/python install $(PIP_FLAGS) pip -c requirements/dev.txt

$(SGLANG_NEEDS):
	@echo 'no environment for SGLANG=$(RELEASE); there are:' \
		$(patsubst requirements/sglang-%.txt,%,$(wildcard requirements/sglang-*.txt)) >&2; exit 1

$(DEPS_STAMP): $(ENGINE_NEEDS) | $(VENV)/bin/pip
	@echo "[setup 2/4] installing torch (about 200 MB)"
	@$(PIP_INSTALL) -r requirements/torch.txt -c requirements/cpu.txt -c requirements/dev.txt \
		$(if $(TORCH_INDEX_URL),--extra-index-url $(TORCH_INDEX_URL))
	@echo "[setup 3/4] installing SGLang $(RELEASE) and what its CPU engine needs"
	@$(PIP_INSTALL) --no-deps -r $(SGLANG_NEEDS) -r requirements/cpu.txt -r requirements/dev.txt
	@touch $@

$(READY_STAMP): pyproject.toml setup.py $(SHIM_FILES) $(DEPS_STAMP)
	@echo "[setup 4/4] installing sglang-kv-canary beside it"
	@$(PIP_INSTALL) --quiet --no-deps --no-build-isolation ./$(SHIM) -e .
	@touch $@

# Apart, so that tests do not need it.
$(DOCS_STAMP): $(DOCS_NEEDS) $(DEPS_STAMP)
	@echo "[docs] installing mkdocs-material"
	@$(PIP_INSTALL) --no-deps -r $(DOCS_NEEDS)
	@touch $@
