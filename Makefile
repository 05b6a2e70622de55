# Everything here works on a fresh clone: the virtual environment is made when it is missing.
#   make demo PYTHON=python3.12     another interpreter for the environment
#   make demo EXTRA=cuda            vLLM's CUDA build instead of its CPU build
PYTHON ?= python3
# The build of vLLM that is in .venv; the CPU one if there is none.
EXTRA ?= $(if $(findstring cuda,$(shell sed -n 2p .venv/draftsmith-install 2>/dev/null)),cuda,cpu)
BIN := .venv/bin
INTERPRETER := .interpreter

.DEFAULT_GOAL := help
.PHONY: help install venv demo venv-dev test test-v2 suffix soak bench dry-run-cuda lint typecheck docs clean

help:  ## Show this list
	@grep -hE '^[a-z][a-z-]*:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

venv:
	@PYTHON="$(PYTHON)" scripts/bootstrap.sh "$(EXTRA),demo"

venv-dev:  ## Install Draftsmith with the packages that tests and checks need
	@PYTHON="$(PYTHON)" scripts/bootstrap.sh "$(EXTRA),demo,dev"

install: venv  ## Install Draftsmith into .venv, and no more
	@echo "Installed. Next: source .venv/bin/activate && draftsmith doctor"

demo: venv  ## Make SmolLM2-135M faster, from nothing: extract, train, convert, evaluate (under 20 minutes on 2 cores)
	$(BIN)/draftsmith run recipes/demo.yaml

# Two processes, a file of tests at a time: an engine's start is work for one core.
test: venv-dev  ## Unit and integration tests
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder

# vLLM takes another model runner on GPUs. Triton's interpreter runs that one on a CPU: see tests/v2/README.md.
test-v2: $(INTERPRETER)/installed  ## Tests with the model runner that vLLM takes on GPUs, on a CPU; slow (some: TESTS=tests/v2/test_states.py)
	PYTHONPATH="$(CURDIR)/$(INTERPRETER)" TRITON_INTERPRET=1 VLLM_USE_V2_MODEL_RUNNER=1 $(BIN)/python -m pytest $(or $(TESTS),tests/v2)

# A folder in front of .venv's packages: with this Triton in .venv itself, vLLM would take other paths in all other tests.
$(INTERPRETER)/installed: $(wildcard tests/v2/interpreter/*.toml tests/v2/interpreter/*/*.py) | venv-dev
	@rm -rf $(INTERPRETER)
	@$(BIN)/python -m pip install --quiet --no-deps --target $(INTERPRETER) triton==3.7.1
	@$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --target $(INTERPRETER) ./tests/v2/interpreter
	@touch $@

suffix: venv-dev  ## Build the package that suffix decoding needs (a minute)
	@$(BIN)/python -c "import arctic_inference" 2>/dev/null || { $(BIN)/python -m pip install --quiet nanobind==2.9.2 cmake ninja wheel && PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m pip install --quiet --no-deps --no-build-isolation arctic-inference==0.3.0; }

soak: suffix  ## The tests that take longer: writers killed 200 times and trainings too, a machine of a Ray cluster killed, servers started wrongly or with hundreds of clients, every method served and sampled, every family of targets, and `test-v2`
	DRAFTSMITH_SOAK=1 DRAFTSMITH_KILL_CASES=100 $(BIN)/python -m pytest tests/unit/test_store.py tests/unit/test_trainer_processes.py tests/unit/test_trainer_resumes.py -k "killed or timeout"
	DRAFTSMITH_SOAK=1 $(BIN)/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder tests/unit/test_suffix.py tests/integration/test_block_formats_in_vllm.py tests/integration/test_extract_on_ray.py tests/integration/test_extract_server.py tests/integration/test_kinds.py tests/integration/test_served.py tests/integration/test_server.py tests/integration/test_lossless.py tests/integration/test_fidelity.py tests/integration/test_forms.py tests/integration/test_families.py tests/integration/test_tensor_parallel.py tests/integration/test_windows_in_vllm.py
	@sed -n '/families: written/,/end of families/p' docs/supported.md
	$(MAKE) test-v2

bench: venv-dev  ## Measure; writes runs/bench/results.json, fails where a bar is missed (some: ONLY="store_costs training_step")
	$(BIN)/python -m tests.benchmarks $(ONLY)

dry-run-cuda:  ## Which versions an install for GPUs would take, by uv and by pip; fails where there are none
	PYTHON="$(PYTHON)" scripts/bootstrap.sh cuda,demo --dry-run

# The documents' tests are here too: who changed a heading alone runs no others.
lint: venv-dev  ## Style, formatting, which module may import which, and whether documents name what exists
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/python scripts/import_circles.py
	$(BIN)/python -m pytest --quiet --no-header tests/unit/test_readme.py tests/unit/test_docs.py tests/unit/test_style.py

typecheck: venv-dev  ## mypy
	$(BIN)/mypy -p draftsmith -p tests.gpu

docs: venv-dev  ## The documentation site, into build/docs; fails on a broken link
	$(BIN)/python scripts/reference_pages.py docs/reference
	$(BIN)/zensical build --clean --strict
	@echo "Open build/docs/index.html; for the search: python3 -m http.server --directory build/docs"

clean:  ## Remove build products and caches (runs/ and .venv/ stay)
	rm -rf build dist docs/reference *.egg-info .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
