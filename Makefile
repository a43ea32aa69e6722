# make serve     a server with the embedded model on port 30000      (MODEL=…  another model, ARGS=…  more flags)
# make serve-gpu a server on an NVIDIA GPU                            (MODEL=…  a model, ARGS=…  more flags)
# make demo      a chat about a long text, with tiers and then without, in five to ten minutes
# make stress    a mix of tenants against a running server           (MIX=…  a file, ARGS=…  address and flags)
# make test      the quick tests                                     (make test-full  all of them)
# make test-monitoring  Prometheus against a real server: every expression of dashboards, rules and alerts
# make check     lint, format, types, import rules, tests

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
OLD_TRITON := $(VENV)/triton-3.6

PARALLEL := --numprocesses auto --maxprocesses 4 --dist worksteal

SOURCES := sglang_qevict tiers kernels monitoring tests benchmarks

.PHONY: install serve serve-gpu demo stress test test-full test-monitoring check lint format clean distclean

install: $(INSTALLED)

$(INSTALLED): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "$(PYTHON) is older than 3.11; name a newer one: make PYTHON=python3.12 ..." >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check --editable '.[dev]'
	@touch $@

serve: install
ifdef MODEL
	exec $(BIN)/sglang serve --config configs/serve.yaml --model-path $(MODEL) $(ARGS)
else
	@model="$$($(BIN)/sglang-qevict fetch-model)" && set -x && exec $(BIN)/sglang serve --config configs/serve.yaml \
		--model-path "$$model" --served-model-name SmolLM2-135M-Instruct $(ARGS)
endif

serve-gpu: install
	@test -n "$(MODEL)" || { echo "name a model: make serve-gpu MODEL=meta-llama/Llama-3.1-8B-Instruct" >&2; exit 1; }
	exec $(BIN)/sglang serve --config configs/serve-gpu.yaml --model-path $(MODEL) $(ARGS)

demo: install
	$(BIN)/python -m sglang_qevict.demo $(ARGS)

MIX ?= configs/stress/quick.yaml

stress: install
	exec $(BIN)/sglang-qevict stress $(MIX) $(ARGS)

# Tests that start servers follow one at a time: each needs the whole machine for what it times.
test: install $(OLD_TRITON)
	$(BIN)/pytest -m "not slow and not server" $(PARALLEL)
	$(BIN)/pytest -m "not slow and server"

test-full: install $(OLD_TRITON)
	$(BIN)/pytest -m "not server" $(PARALLEL)
	$(BIN)/pytest -m server

test-monitoring: install
	@command -v prometheus promtool > /dev/null || { \
		apt-get update --quiet && apt-get install --yes --quiet --no-install-recommends prometheus; }
	$(BIN)/pytest tests/monitoring

# The kernels are tested with the oldest Triton that they are written for as well.
$(OLD_TRITON): | $(INSTALLED)
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --no-deps --target $@ triton==3.6.0

check: lint test

lint: install
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/mypy
	$(BIN)/mypy benchmarks
	$(BIN)/lint-imports

format: install
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

clean:
	rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -print | xargs -r rm -rf

distclean: clean
	rm -rf $(VENV)
