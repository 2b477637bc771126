# A front for CMake (CMakePresets.json): `make demo` and `make test` do everything from a clean clone.
# Packages are installed when missing (scripts/setup.sh); later runs need no network.
SHELL := /bin/bash
JOBS ?= $(shell nproc)
# Compiler warnings are errors in CI, warnings for everybody else.
FLAGS := $(if $(CI),-DMOXIE_WERROR=ON)
# $(call configure,PRESET), $(call build,PRESET,TARGET): quiet unless something is wrong; ninja's progress line only
# on a terminal.
configure = mkdir -p build && cmake --preset $(1) $(FLAGS) >build/$(1).log 2>&1 || { cat build/$(1).log; exit 1; }
build = cmake --build --preset $(1) -j $(JOBS) --target $(2) $$([ -t 1 ] || echo -- --quiet)

.PHONY: help setup build demo test asan tsan cuda python bench fmt check clean

help:
	@echo "make demo    run a whole MoE layer, forward and backward, over four ranks on this machine"
	@echo "make test    build and run the tests"
	@echo "make python  build the Python package, install it in a fresh virtual environment, run its tests"
	@echo "make asan | tsan | cuda | bench | fmt | check | clean    see CONTRIBUTING.md"

setup:
	@scripts/setup.sh

build: setup
	@$(call configure,cpu)
	@$(call build,cpu,moxie_cli)

demo: build
	@mkdir -p build/demo
	build/cpu/bin/moxie run --check --trace build/demo/timeline

test: setup
	@$(call configure,cpu)
	@$(call build,cpu,all)
	ctest --preset cpu -j $(JOBS)

# Sanitizers: plain GEMM loops, so that every load and store is seen.
asan tsan: setup
	@$(call configure,$@)
	@$(call build,$@,all)
	ctest --preset $@ -j $(JOBS)

# Compiles the CUDA side; its tests skip where there is no GPU.
cuda: setup
	@$(call configure,cuda)
	@$(call build,cuda,moxie_cli moxie_gpu_tests moxie_bench)
	ctest --preset cuda

# The wheel, a fresh virtual environment in build/python, pytest. The tests that need the command skip without it.
python:
	@scripts/setup.sh --python
	@scripts/python_check

bench: setup
	@$(call configure,cpu)
	@$(call build,cpu,moxie_bench)
	@for program in build/cpu/bench/bench_*; do echo "$$program"; $$program || exit 1; done

fmt:
	@scripts/format

check:
	@scripts/format --check
	@scripts/check_layers
	@scripts/check_docs

clean:
	rm -rf build
