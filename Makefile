# Everything sets itself up: a machine with Python ≥ 3.11 is enough.  `make help` lists the targets.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

VENV := .venv
BIN := $(VENV)/bin
export PATH := $(CURDIR)/$(BIN):$(PATH)
export PYTHONDONTWRITEBYTECODE :=  # thousands of processes would compile the same files, and pytest rewrite all tests

# A stamp says "this group of requirements is installed"; its name is their contents, so nothing is installed twice
# and a second run needs no network.
stamp = $(VENV)/.$(1)-$(shell { sed '/^\[tool/Q' pyproject.toml; cat requirements/run.txt requirements/$(1).txt; } | sha256sum | cut -c1-12)
RUN := $(call stamp,run)
TEST := $(call stamp,test)
CHECK := $(call stamp,check)
DOCS := $(call stamp,docs)
BENCH := $(call stamp,bench)
KUBE := $(call stamp,kube)
JAX := $(call stamp,jax)
TOOLS := $(call stamp,tools)

.PHONY: help
help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*  ## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 18

.PHONY: demo
demo: $(RUN)  ## two workers train, one is killed, the job continues and finishes
	@python examples/demo.py

.PHONY: test
test: $(TEST) tools  ## the tests, without the long ones
	python -m pytest -n 3 --dist=loadfile --no-loadscope-reorder -m "not long"

SCHEDULES ?= 100000
FROM ?= 1000000

.PHONY: simulate
simulate: $(TEST)  ## SCHEDULES=100000 random schedules of the simulators, with seeds FROM=1000000 on (minutes)
	RIPSTOP_SCHEDULES=$(SCHEDULES) RIPSTOP_SCHEDULES_FROM=$(FROM) \
		python -m pytest -n 2 --dist=worksteal tests/simulation/test_schedules.py -k every_schedule

.PHONY: test-all
test-all: $(TEST) tools  ## the tests, all of them
	python -m pytest

.PHONY: test-kube
test-kube: $(KUBE)  ## the tests against a Kubernetes API server, which KUBECONFIG names
	@test -n "$${KUBECONFIG-}" || { \
		echo "KUBECONFIG names no cluster; one for tests: kind create cluster, then export KUBECONFIG=~/.kube/config"; exit 2; }
	@test -n "$${RIPSTOP_TEST_NODES-}" || \
		echo "RIPSTOP_TEST_NODES names no command to take nodes away: tests/kubernetes/kube/test_nodes*.py are left out"
	python -m pytest tests/kubernetes

.PHONY: test-jax
test-jax: $(JAX)  ## the tests with JAX (600 MB)
	python -m pytest tests/e2e/test_jax.py

.PHONY: compat
compat: $(TOOLS)  ## accelerate, Lightning, transformers, DeepSpeed, Ray and others on ripstop, with kills (1 GB)
	python -m pytest tests/compat/test_tools.py tests/compat/test_tools_faults.py tests/train/test_frameworks.py

.PHONY: check
check: $(TEST) $(CHECK) $(DOCS)  ## style, types, import layers, documentation
	ruff check .
	ruff format --check .
	mypy
	lint-imports --no-cache
	hadolint deploy/Containerfile.*
	NO_MKDOCS_2_WARNING=1 mkdocs build --strict --quiet --site-dir $(VENV)/site

.PHONY: format
format: $(CHECK)  ## put the code in our style
	ruff check --fix .
	ruff format .

.PHONY: bench
bench: $(BENCH)  ## measure ripstop beside torchrun
	@$(compiled)
	python bench/recovery.py --launcher torchrun="env TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun" \
		--launcher ripstop="ripstop run" --json bench/results/recovery.json
	python bench/plot.py bench/results/recovery.json docs/images/recovery.svg
	python bench/tee.py --json bench/results/tee.json
	python bench/overhead.py --json bench/results/overhead.json

PEERS ?= /tmp/ripstop-peers

.PHONY: goodput
goodput: $(RUN)  ## useful steps under faults: torchrun, ft_launcher, torchft, ripstop (40 minutes; a quiet machine)
	@$(compiled)
	test -x $(PEERS)/bin/torchft_lighthouse || { python -m venv $(PEERS) && $(PEERS)/bin/pip install -q torch==2.13.0 \
		&& $(PEERS)/bin/pip install -q -r requirements/peers.txt; } || echo "peers that could not be installed are left out"
	python bench/goodput.py --peers $(PEERS)/bin --json bench/results/goodput.json

.PHONY: dist
dist: $(RUN)  ## build dist/*.tar.gz and, from it, dist/*.whl
	rm -rf dist
	python -m hatchling build --target=sdist
	python -m pip wheel -qq --disable-pip-version-check --no-build-isolation --no-deps --wheel-dir=dist dist/*.tar.gz

PYTHONS ?= 3.11 3.12 3.13 3.14
TORCHES ?= none

.PHONY: matrix
matrix: dist  ## the wheel under PYTHONS="3.11 3.12 …" and TORCHES="none 2.13.0 …" (PyPI's torch may bring gigabytes of CUDA)
	python -m tests.packaging.matrix --python $(PYTHONS) --torch $(TORCHES)

.PHONY: venv
venv: $(TEST) $(CHECK) $(DOCS)  ## the virtual environment alone

.PHONY: clean
clean:  ## remove all that was made here
	rm -rf $(VENV) build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@$(find_python); \
	echo "making $(VENV) with $$python"; \
	"$$python" -m venv $(VENV)

$(RUN): | $(BIN)/python
	@echo "installing ripstop and what a job needs (torch is large: minutes, once)"
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -r requirements/run.txt
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --no-build-isolation --editable .
	@$(compiled)
	@rm -f $(VENV)/.run-*; touch $@

# An installed package has its bytecode beside it; an editable one has it from its first run on, unless the environment
# forbids writing it, and would then compile itself at every start (a third of the start-up of a small job).
compiled = $(BIN)/python -m compileall -q src

# The other groups: $(VENV)/.GROUP-HASH
$(TEST) $(CHECK) $(DOCS) $(BENCH) $(KUBE) $(JAX) $(TOOLS): | $(RUN)
	@group=$$(basename $@ | sed 's/^\.\(.*\)-[0-9a-f]*$$/\1/'); \
	echo "installing requirements/$$group.txt"; \
	$(BIN)/python -m pip install -qq --disable-pip-version-check -r requirements/$$group.txt; \
	rm -f $(VENV)/.$$group-*; touch $@

# The first interpreter that is new enough and can make virtual environments.
define find_python
python=; \
for name in python3 python3.13 python3.12 python3.11; do \
	if "$$name" -c 'import sys, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; \
	then python=$$name; break; fi; \
done; \
if [ -z "$$python" ]; then \
	echo "no Python >= 3.11 with the venv module on PATH; install one (Debian, Ubuntu: apt install python3-venv)" >&2; \
	exit 1; \
fi
endef

# Tests across network namespaces want `ip`, some of them `iptables`, those with etcd want `etcd`, those of metrics
# `prometheus`, those of the page `chromium`, those of `ripstop top` `tmux`; without them they say so and skip.  Debian
# would start services: policy-rc.d keeps it from that, as the tests start their own.
.PHONY: tools
tools:
	@$(call tool,ip,iproute2)
	@$(call tool,etcd,etcd-server)
	@$(call tool,iptables,iptables)
	@$(call tool,prometheus,prometheus)
	@$(call tool,chromium,chromium)
	@$(call tool,tmux,tmux)

define tool
if ! command -v $(1) >/dev/null && [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	echo "installing $(2) for the tests that want $(1)"; \
	if ! [ -e /usr/sbin/policy-rc.d ]; then \
		trap 'rm -f /usr/sbin/policy-rc.d' EXIT; \
		printf '#!/bin/sh\nexit 101\n' >/usr/sbin/policy-rc.d; \
		chmod +x /usr/sbin/policy-rc.d; \
	fi; \
	{ apt-get -qq update && apt-get -qq install -y --no-install-recommends $(2); } >/dev/null 2>&1 \
		|| echo "$(2) could not be installed; those tests will skip"; \
fi
endef
