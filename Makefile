# Everything starts here. A fresh machine needs Python 3.11 or 3.12 with pip, and make.
# The set that is installed, or the CPU set. The two cannot be installed together.
EXTRA ?= $(if $(wildcard .venv/.installed-gpu)$(filter test-gpu,$(MAKECMDGOALS)),gpu,cpu)
PYTHON ?= python3
ARGS ?=
BENCH ?= packing logprob python_tool bfloat16 step_time profile_step scaling rollout weight_delta weight_sync checkpoint age journal trace recovery lost_rank ahead environments warm_servers view plan scale driver_scale rendezvous vs_trl resume_vs_trl
# Files with tests of a release: each worker imports all that it is given.
RELEASE = tests/cpu/release $(shell grep -rl --include='test_*.py' 'mark\.release' tests/cpu | sort)
BIN := .venv/bin
STAMP := .venv/.installed-$(EXTRA)
# Some images set it; then every process would compile torch, vLLM and Ray anew, and take twice as long to start.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup demo check test release-check test-gpu bench lint lock docs site

setup: $(STAMP)  ## .venv with the locked packages; EXTRA=gpu for the GPU set

$(STAMP): pyproject.toml uv.lock tools/install.py
	@$(PYTHON) tools/install.py $(EXTRA)

demo: setup  ## train the built-in default with GRPO
	$(BIN)/python -m trainer train $(ARGS)

check: lint  ## lint, and the CPU tests that start no process: no run, rank, vLLM, Ray, command or sandbox
	$(BIN)/python -m pytest tests/cpu -m "not processes and not release" -n auto --maxprocesses 8 --dist loadfile $(ARGS)

test: setup  ## the CPU tests
	$(BIN)/python -m pytest tests/cpu -m "not release" -n 4 --dist loadfile --no-loadscope-reorder $(ARGS)

release-check: setup  ## what guards a release: wheel, image, recipes, Slurm, browser, tutorial, examples, several nodes
	$(BIN)/python -m pytest $(RELEASE) -m release -n 4 --dist loadfile --no-loadscope-reorder $(ARGS)

test-gpu: setup  ## the same promises on GPUs
	$(BIN)/python -m pytest tests/gpu_ci $(ARGS)

# GSM8K=train.jsonl takes its questions; without it they are made up.
bench: setup  ## every benchmark, at sizes for two cores; BENCH="packing logprob" for some
	@set -e; for name in $(BENCH); do echo "== $$name"; $(BIN)/python -m benchmarks.$$name $(ARGS); done

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

lock: setup  ## re-resolve; ARGS=--upgrade to move every pin
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python tools/lock.py $(ARGS)

docs: setup  ## docs/config.md from the schema, the tables of docs/metrics.md from names and advice, docs/algorithms.md from docstrings
	$(BIN)/python -m trainer config > .venv/config.md && mv .venv/config.md docs/config.md
	$(BIN)/python -m trainer.metrics.names < docs/metrics.md > .venv/metrics.md && mv .venv/metrics.md docs/metrics.md
	$(BIN)/python -m trainer.metrics.advice < docs/metrics.md > .venv/metrics.md && mv .venv/metrics.md docs/metrics.md
	$(BIN)/python -m tools.algorithms_doc > .venv/algorithms.md && mv .venv/algorithms.md docs/algorithms.md

site: setup  ## the documentation as a site in build/site
	$(BIN)/python -m tools.docs_site
