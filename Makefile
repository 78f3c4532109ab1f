# penjing: `make demo` runs the main job, `make test` the tests; both set everything up.
# Needs Python ≥ 3.11 with venv and a shared libpython, glibc ≥ 2.35 for the embedded Triton server, and a package index.
# A C++ compiler (g++ ≥ 11) gives the fast CPU kernels; without one penjing says so and runs on torch.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Compiled modules are kept, whatever the caller's environment says: tests start many processes, and each would compile penjing.
export PYTHONDONTWRITEBYTECODE :=
# Tests run in two processes; each keeps its kernels on one core.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/pytest
# Exit code 1: some tests failed. They run once more, alone: one that fails again is broken, another is named above and to be mended.
# pytest-xdist adds the name of a test's group to the test's, by which pytest would not find it again.
AGAIN := { [ $$? = 1 ] && echo 'the tests that failed, once more and alone:' && sed -i 's/@[[:alnum:]_-]*": true/": true/' .pytest_cache/v/cache/lastfailed && $(PYTEST) -v --last-failed --last-failed-no-failures none; }
PACKAGES := kernels core train compress curate serve model_repository recipes
CPU_SOURCES := $(wildcard kernels/cpu/*.cpp kernels/cpu/*.h)

.PHONY: help install demo test test-page test-full test-gpu sanitize lint format recipes-doc docs bench bench-gpu chaos image image-test clean links

help: ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "make %-12s %s\n", $$1, $$2}'

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo 'error: penjing needs Python >= 3.11; call make PYTHON=python3.11'; exit 1; }
	$(PYTHON) -m venv $(VENV)

# torch first: the pinned CPU build keeps later packages from choosing one with gigabytes of CUDA.
$(STAMP): pyproject.toml constraints.txt setup.py $(CPU_SOURCES) | $(BIN)/python
	$(BIN)/python -m pip install -q -c constraints.txt torch
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev,curate]'
	@$(MAKE) --no-print-directory links
	@touch $@

install: $(STAMP) ## make the environment (.venv)

demo: $(STAMP) ## import SmolLM2-135M, compress it to INT8, serve it from Triton server, stream answers
	$(BIN)/python docs/examples/demo.py

test: $(STAMP) ## the tests (two processes; what fails runs once more, alone)
	$(PYTEST) -n 2 --dist loadgroup || $(AGAIN)

$(VENV)/.browser: $(STAMP)
	@command -v chromium >/dev/null || { echo 'error: no chromium here; try: apt-get install chromium'; exit 1; }
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev,curate,browser]'
	@touch $@

test-page: $(VENV)/.browser ## the page at / in Debian's Chromium, before a real server
	$(PYTEST) tests/serve/front/test_page_in_browser.py

test-full: $(STAMP) ## the tests with their long variants
	$(PYTEST) -n 2 --dist loadgroup -m ""

sanitize: $(STAMP) ## the C++ kernels' tests under Address-, UndefinedBehavior- and ThreadSanitizer
	PYTHON=$(BIN)/python bash tests/kernels/sanitize.sh

# On a GPU machine penjing need not be installed: torch, the Triton language, numpy, pydantic and pytest are enough.
GPU_PYTHON ?= $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON))
GPU := PYTHONPATH=build/src $(GPU_PYTHON)

links:
	@mkdir -p build/src/penjing
	@for folder in $(PACKAGES); do ln -sfn ../../../$$folder build/src/penjing/$$folder; done
	@for file in api/*.py api/py.typed; do ln -sf ../../../$$file build/src/penjing/; done

test-gpu: links ## the Triton-language kernels on a real GPU (TRITON_INTERPRET=1: in the interpreter)
	$(GPU) -m pytest -q -c /dev/null --rootdir . --confcutdir tests/kernels/gpu --import-mode importlib \
	  -p no:cacheprovider tests/kernels/gpu

lint: $(STAMP) ## ruff, format, types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --warnings --pythonpath $(BIN)/python

format: $(STAMP) ## rewrite the sources in the house format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

recipes-doc: $(STAMP) ## write docs/recipes.md anew from the settings' descriptions
	$(BIN)/python -m penjing.core.recipe_keys > build/recipes.md
	@mv build/recipes.md docs/recipes.md
	$(BIN)/python -m penjing.core.recipe_keys names > build/recipe_names.json
	@mv build/recipe_names.json core/recipe_names.json

$(VENV)/.docs: $(STAMP)
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev,curate,docs]'
	@touch $@

docs: $(VENV)/.docs ## build the documentation site into build/site
	$(BIN)/python benchmarks/results_page.py --check
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

bench: $(STAMP) ## measure the engine against transformers, through Triton server and beside its kernels; appends rows
	$(BIN)/python benchmarks/run_engine.py
	$(BIN)/python benchmarks/run_server.py
	$(BIN)/python benchmarks/run_front.py
	$(BIN)/python benchmarks/run_overhead.py

chaos: $(STAMP) ## kill, stop, leave and fuzz a served SmolLM2 for a quarter of an hour; appends rows of what it did to whom
	$(BIN)/python benchmarks/run_chaos.py

bench-gpu: test-gpu ## check the GPU kernels, then measure them and the engine against torch and the ceilings; appends rows
	$(GPU) benchmarks/run_kernels_gpu.py

image: ## build the container image (docker, else buildah)
	bash docker/build.sh

image-test: ## start the image's server and stream a token
	bash docker/test.sh

clean: ## remove what make built
	rm -rf build $(VENV)
