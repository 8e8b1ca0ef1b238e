# make install   set everything up: a virtual environment in .venv and the project in it
# make demo      set everything up and take the tour
# make test      set everything up and run the tests
# make fuzz      feed a million damaged programs to the C++ runtime under AddressSanitizer, and record it
# make cross     get ExecuTorch for 64-bit Arm, for the tests that run under qemu
# make suite     run ExecuTorch's own backend test suite with our flow, and record what came of it
# make oldest    what depends on torch's version, with the oldest that the project takes (downloads gigabytes)
# make check     formatting, lint, types
# make tidy      clang-tidy over the C++ sources (about a minute)
# make docs      build the site in docs/_build/html; anything doubtful fails the build
# make test-gpu  run the backend contract on the devices that are here, and record which kernels passed
# make evidence-gpu  on a GPU: test every kernel and make the GPU records, with a time limit for each step; resumable
# make docs-gpu  run every block of the documentation on the GPU that is here, and record which passed
# make evidence  make the records and pages that need no hardware anew
# make probe     lower and run every operator anew: the table of operators of the cpu backend (about ten minutes)
# make evidence-check  say which recorded numbers are older than the code they measure; fails where none can say

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CHECKED := src tests tools benchmarks demos docs conftest.py
SITE := docs/_build/html
NATIVE := src/kernel_pytorch/lowering/native

.PHONY: install demo test oldest check tidy fuzz cross suite docs docs-gpu test-gpu evidence evidence-gpu evidence-check probe clean

# The stamp is older than what it depends on exactly when there is something to install.
$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("Python 3.10 to 3.13 is needed, this is " + sys.version.split()[0] + ": make PYTHON=python3.12 install" if not (3, 10) <= sys.version_info[:2] <= (3, 13) else 0)'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	$(BIN)/kernel-pytorch build-runtime
	touch $@

install: $(VENV)/.installed

demo: install
	$(BIN)/kernel-pytorch tour

test: install
	$(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadscope

# Triton 3.6, which belongs to that torch, interprets kernels with numpy up to 2.3.
oldest:
	test -x .venv-oldest/bin/python || $(PYTHON) -m venv .venv-oldest
	.venv-oldest/bin/python -m pip install --quiet 'torch==2.11.*' 'numpy<2.4' hypothesis pytest pytest-xdist --editable '.[plots]'
	.venv-oldest/bin/python -m pytest -n auto --maxprocesses 4 --dist loadscope --confcutdir=tests \
		tests/fp8/test_fp8_*.py tests/ops/test_attention_compile.py tests/hardware_abstraction/test_dispatch.py tests/parity/test_parity.py

check: install
	$(BIN)/ruff check $(CHECKED)
	$(BIN)/ruff format --check $(CHECKED)
	$(BIN)/mypy

tidy: install
	$(BIN)/cmake -S $(NATIVE) -B $(VENV)/tidy -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN)/ninja) \
		-DCMAKE_PREFIX_PATH=$$($(BIN)/python -c 'from kernel_pytorch.lowering.build import executorch_root; print(executorch_root())') \
		-DCMAKE_EXPORT_COMPILE_COMMANDS=ON -DKERNEL_PYTORCH_TESTS=$(abspath tests/lowering/native) > /dev/null
	ls $(foreach folder,core operators kernels tools,$(NATIVE)/$(folder)/*.cpp) tests/lowering/native/*.cpp | \
		xargs -P 2 -n 4 clang-tidy -p $(VENV)/tidy --quiet

fuzz: install
	$(BIN)/python tests/lowering/fuzz_payload.py --cases 1000000 --write
	$(BIN)/python -m tools.website.freshness --sum

cross: install
	$(BIN)/python -m pip download --quiet --no-deps --only-binary :all: --platform manylinux_2_28_aarch64 \
		--constraint constraints.txt --dest $(VENV)/aarch64 executorch

suite: install
	$(BIN)/python -m kernel_pytorch.testing.executorch_suite --write
	$(BIN)/python -m tools.website.freshness --sum

docs: install
	$(BIN)/sphinx-build --fresh-env --fail-on-warning --keep-going --nitpicky --quiet --builder html --conf-dir docs . $(SITE)
	@echo 'open $(SITE)/index.html'

test-gpu: install
	$(BIN)/python -m kernel_pytorch.testing.contract_run --record

docs-gpu: install
	$(BIN)/python -m tools.website.execute --record

evidence-gpu: install
	$(BIN)/python -m tools.evidence_gpu

evidence: install
	$(BIN)/python -m kernel_pytorch.testing.checks --write
	$(BIN)/python -m tools.website --write

probe: install
	$(BIN)/kernel-pytorch backend docs cpu --out docs/backends/cpu --probe
	$(BIN)/python -m tools.website --write

evidence-check: install
	$(BIN)/python -m tools.website.freshness

clean:
	rm -rf $(VENV) .venv-oldest $(SITE) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
