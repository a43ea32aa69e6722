# make serve     a server with the embedded model on port 30000      (MODEL=…  another model, ARGS=…  more flags)
# make serve-gpu a server on an NVIDIA GPU                            (MODEL=…  a model, ARGS=…  more flags)
# make demo      a chat about a long text, with tiers and then without, in five to ten minutes
# make stress    a mix of tenants against a running server           (MIX=…  a file, ARGS=…  address and flags)
# make soak      that on a server too small for it, for an hour      (MINUTES=…)
# make test      the quick tests                                     (make test-full  all of them)
# make test-monitoring  Prometheus against a real server: every expression of dashboards, rules and alerts
# make quality   what tiers cost in quality, in two hours            (make rivals     other methods at the same bytes)
# make check     lint, format, types, import rules, tests

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
OLD_TRITON := $(VENV)/triton-3.6

PARALLEL := --numprocesses auto --maxprocesses 4 --dist worksteal

SOURCES := sglang_qevict tiers kernels monitoring tests benchmarks

.PHONY: install serve serve-gpu demo stress soak test test-full test-monitoring quality rivals check lint format clean distclean

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

MINUTES ?= 60

soak: install
	QEVICT_SOAK_MINUTES=$(MINUTES) $(BIN)/pytest -s tests/server/test_soak.py

# Tests that start servers follow one at a time: each needs the whole machine for what it times.
# Threads sleep at a barrier instead of spinning, since those of other tests want their cores.
test test-full test-monitoring: export OMP_WAIT_POLICY := PASSIVE

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

# What tiers cost in quality: two hours on two cores. Results go to benchmarks/results/quality.
RESULTS := results/quality
QUALITY := $(VENV)/.quality

$(QUALITY): $(INSTALLED)
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --editable '.[quality]'
	@touch $@

quality: $(QUALITY)
	cd benchmarks && for budget in 0.2 0.1; do ../$(BIN)/python -m quality.ablations --half test --budget $$budget \
		--group presets --group codes --group four --json $(RESULTS)/ablations-test-$$budget.json || exit 1; done
	cd benchmarks && ../$(BIN)/python -m quality.retrieval --json $(RESULTS)/retrieval.json
	cd benchmarks && ../$(BIN)/python -m quality.generations --json $(RESULTS)/generations.json

# Other methods run as they are published, with the transformers that they want, in an environment on top of this one.
RIVALS := $(VENV)/rivals

$(RIVALS): | $(QUALITY)
	$(BIN)/python -m venv $@
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > \
		"$$($@/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/zz_base.pth"
	$@/bin/python -m pip install --disable-pip-version-check --quiet kvpress==0.5.5 optimum-quanto

rivals: $(RIVALS)
	cd benchmarks && ../$(RIVALS)/bin/python -m quality.rivals --model "$$(../$(BIN)/sglang-qevict fetch-model)" \
		--json $(RESULTS)/rivals.json

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
