# `make help` lists the targets. Everything works from a fresh clone: each target sets up what it needs.

# The engine set: `cpu`, or `gpu` on a machine with a GPU.
ENGINE ?= cpu
# A directory or an index with CPU builds of torch, where pip is not configured for one.
TORCH_INDEX ?=
export TORCH_INDEX

SUPPORTED := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))
PYTHON ?= $(shell for p in python3.11 python3 python3.12 python3.13; do \
	$$p -c '$(SUPPORTED)' 2>/dev/null && { echo $$p; break; }; done)

BIN := .venv/bin
# Named for the content of what it installs: a clone or a branch switch with the same lock sets up nothing again.
INPUTS := infra/locks/$(ENGINE).lock infra/locks/uv.txt infra/setup/install.py pyproject.toml
STAMP := .venv/pdq-$(ENGINE)-$(shell cat $(INPUTS) 2>/dev/null | cksum | cut -d' ' -f1)
# The servers behind every KV mode, which only tests and benchmarks start.
STORES := .venv/pdq-stores-$(shell cat infra/locks/verify.lock 2>/dev/null | cksum | cut -d' ' -f1)

# Tests that need no engine wait more than they compute; those with engines take all the machine has.
PARALLEL := --numprocesses 3 --dist worksteal

# Tests kill processes and wait for others on a machine that they share: what failed is run once more, alone. What the
# load made fails no second time, and what the code makes does; the first failure stays in the output, and is a fault.
# $(1): which, as pytest's -m takes it; $(2): options of the first run.
define TESTS
$(BIN)/pytest -m "$(1)" $(2) --durations 25 || { test $$? -eq 1 && echo "== once more, alone: what failed above" && \
	$(BIN)/pytest -m "$(1)" --last-failed --last-failed-no-failures none --maxfail 5; }
endef

# Without bytecode an engine starts twice as slowly; some shells turn it off.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup model demo test test-fast test-compose chaos resume upgrade scaling edge soak bench-control bench-scale bench-tokens bench-streams bench-replay bench-kv bench-cold-start bench-up benchmarks benchmarks-page verify-all times lint up down lock clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) model ## install everything into .venv and fetch the model (ENGINE=gpu for a GPU machine)

$(STAMP):
	@test -n "$(PYTHON)" || { echo "pdq needs Python 3.11, 3.12 or 3.13: none is on the PATH (PYTHON=... names one)" >&2; exit 1; }
	@$(PYTHON) infra/setup/install.py $(ENGINE)
	@rm -f .venv/pdq-$(ENGINE)-* && touch $@

$(STORES): $(STAMP)
	@$(BIN)/python -m pip install --quiet --no-deps --require-hashes -r infra/locks/verify.lock
	@rm -f .venv/pdq-stores-* && touch $@

model: $(STAMP)
	@$(BIN)/python -m pdq.model fetch >/dev/null

demo: setup ## one request through prefill and decode, on real parts, with its trace
	@$(BIN)/python -m pdq.demo

test: setup lint ## everything that must pass: the checks of `lint`, then all tests
	$(call TESTS,not engine and not matrix and not quiet,$(PARALLEL))
	$(call TESTS,engine and not matrix and not quiet)

test-fast: setup ## the tests that need no engine: seconds, not minutes
	$(BIN)/pytest -m "not engine and not matrix and not quiet" $(PARALLEL)

test-compose: $(STAMP) ## docker-compose.yml on this machine, with no image registry: minutes
	@$(BIN)/python infra/compose/test.py

chaos: $(STAMP) ## requests while processes die, stop, drain and lose the network (N=1000 SEED=7); docs/chaos.md
	@$(BIN)/python -m tests.chaos --requests $(or $(N),1000) $(if $(SEED),--seed $(SEED))

resume: $(STAMP) ## streams that are cut and resumed while clients leave, gateways and decode die (N=100 SEED=7)
	@$(BIN)/python -m tests.resume --requests $(or $(N),100) $(if $(SEED),--seed $(SEED))

upgrade: $(STAMP) ## requests while services are replaced by those of later releases, and back (OLD=a working tree); docs/upgrades.md
	@$(BIN)/python -m tests.upgrade $(if $(OLD),--old $(OLD))

scaling: $(STAMP) ## workers from zero and back by KEDA's own number, drawn over time (N=200 SEED=7); docs/scaling.md
	@$(BIN)/python -m tests.scaling --requests $(or $(N),200) $(if $(SEED),--seed $(SEED))

edge: $(STAMP) ## requests at a site while its uplink, broker, forwarder and hub break (N=200 SEED=7); docs/edge.md
	@$(BIN)/python -m tests.edge --requests $(or $(N),200) $(if $(SEED),--seed $(SEED))

soak: $(STAMP) ## an hour of half load, every process watched for what it gains (MINUTES=60 WARM_UP=15); docs/soak.md
	@$(BIN)/python -m tests.soak --minutes $(or $(MINUTES),60) --warm-up $(or $(WARM_UP),15)

bench-control: $(STAMP) ## what the control path costs over its floor; on a quiet machine (REQUESTS=100 ROUNDS=7)
	@$(BIN)/python -m tests.bench.control --requests $(or $(REQUESTS),100) --rounds $(or $(ROUNDS),7)

bench-scale: $(STAMP) ## what a request costs with 10 to 1,000 workers, and how many a second they sustain, over the floor (WORKERS="10 100 1000" RATE=12 ROUNDS=3)
	@$(BIN)/python -m tests.bench.scale --workers $(or $(WORKERS),10 100 1000) --rate $(or $(RATE),12) --rounds $(or $(ROUNDS),3)

bench-tokens: $(STAMP) ## tokens a second from one decode process to one reader through the log, over the floor (ROUNDS=5)
	@$(BIN)/python -m tests.bench.tokens --rounds $(or $(ROUNDS),5)

bench-streams: $(STAMP) ## a thousand SSE streams through one gateway, against a bare subscriber (STREAMS=1000 SECONDS=30)
	@$(BIN)/python -m tests.bench.streams --streams $(or $(STREAMS),1000) --seconds $(or $(SECONDS),30)

bench-replay: $(STAMP) ## goodput of each order in public traces, 100 sim workers each (TRACES="code=FILE conversation=FILE mooncake=FILE"); docs/orders.md
	@test -n "$(TRACES)" || { echo "TRACES names the traces: TRACES=\"code=FILE conversation=FILE mooncake=FILE\"" >&2; exit 1; }
	@$(BIN)/python -m tests.bench.replay $(TRACES) --duration $(or $(SECONDS),600)

bench-kv: $(STORES) ## what moving KV costs in each mode, against memcpy and the bare store (MODES=host,file,... REPEATS=5)
	@$(BIN)/python -m tests.bench.kv --repeats $(or $(REPEATS),5) $(if $(MODES),--modes $(MODES))

bench-cold-start: $(STAMP) model ## from nothing to a worker with the real engine that has served what waited (ROLE=prefill TIER=cold REPEATS=3)
	@$(BIN)/python -m tests.bench.cold_start --role $(or $(ROLE),prefill) --tier $(or $(TIER),cold) --repeats $(or $(REPEATS),3)

benchmarks: $(STORES) model ## all benchmarks, and docs/benchmarks.md from their figures: hours (ONLY="scale tokens" MORE="--rounds 5" TRACES="code=FILE ..." AGAINST=TREE)
	@$(BIN)/python -m tests.bench.publish $(if $(ONLY),--only $(ONLY)) $(if $(TRACES),--traces $(TRACES)) $(if $(AGAINST),--against $(AGAINST)) $(if $(MORE),--more='$(MORE)')

benchmarks-page: $(STAMP) ## docs/benchmarks.md again, from the figures in docs/benchmarks
	@$(BIN)/python -m tests.bench.publish --page

bench-up: $(STAMP) model ## from `pdq up` to ready, and to the first token, over bare engines (ROUNDS=3 AGAINST=a working tree)
	@$(BIN)/python -m tests.bench.up --rounds $(or $(ROUNDS),3) $(if $(AGAINST),--against $(AGAINST))

verify-all: $(STORES) model ## every KV mode in every order, and every fault on KV's way, with real engines: half an hour (MODES="host file ...")
	@$(BIN)/python -m tests.matrix $(MODES)

times: $(STAMP) ## from a cancel to an idle engine, from a kill to the next token, from the broker's return (REPEATS=10)
	@$(BIN)/python -m tests.times --repeats $(or $(REPEATS),10)

lint: $(STAMP) ## formatting, lint, types, the direction of imports, Dockerfiles
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy infra/setup/install.py infra/setup/lock.py
	$(BIN)/mypy infra/compose/*.py infra/docker/*.py
	$(BIN)/lint-imports
	$(BIN)/hadolint services/*/Dockerfile infra/*/Dockerfile infra/docker/*.Dockerfile

up: setup ## the local stack, in the foreground (Ctrl-C ends it)
	@$(BIN)/pdq up

down: ## end a local stack that runs in the background
	@$(BIN)/pdq down

lock: $(STAMP) ## resolve infra/locks again from pyproject.toml (UPGRADE=--upgrade takes newer versions)
	$(BIN)/python infra/setup/lock.py $(UPGRADE)

clean: ## remove .venv, caches and build output; the model in ~/.pdq stays
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build dist
	find shared services tests infra -name __pycache__ -type d -prune -exec rm -rf {} +
