#!/bin/bash
# Tests and bench of the stand-alone grouped GEMM on a Hopper GPU; the table comes last.
#
#   scripts/gpu_check.sh [folder with the binaries, default build-gpu] [folder for results, default the same]
#
# Builds what is missing when nvcc and GoogleTest are here. Every program runs under a time limit: a kernel that
# hangs must not hold the machine.
set -u
cd "$(dirname "$0")/.."
build=${1:-build-gpu}
out=${2:-$build}
rounds=${ROUNDS:-5}
mkdir -p "$build" "$out"

flags="-std=c++20 -O3 -gencode=arch=compute_90a,code=sm_90a -I. -lineinfo -Xcompiler -fPIC -cudart static"
static="-Xcompiler -static-libstdc++,-static-libgcc"
gtest="/usr/lib/x86_64-linux-gnu/libgtest.a /usr/lib/x86_64-linux-gnu/libgtest_main.a -lpthread -ldl -lrt"
missing() { [ ! -e "$build/$1" ] && command -v nvcc > /dev/null; }
if missing grouped_gemm_cuda.o; then nvcc $flags -c moxie/expert/grouped_gemm_cuda.cu -o "$build/grouped_gemm_cuda.o" || exit 1; fi
if missing test_device_ptx; then nvcc $flags -Itests/gpu tests/gpu/test_device_ptx.cu -o "$build/test_device_ptx" $static $gtest || exit 1; fi
if missing test_expert_grouped_gemm; then
  nvcc $flags -Itests/gpu tests/gpu/test_expert_grouped_gemm.cu "$build/grouped_gemm_cuda.o" -o "$build/test_expert_grouped_gemm" $static $gtest || exit 1
fi
if missing libbench_grouped_gemm.so; then
  nvcc $flags -shared bench/bench_grouped_gemm.cu "$build/grouped_gemm_cuda.o" -o "$build/libbench_grouped_gemm.so" $static || exit 1
fi

failed=0
for test in test_device_ptx test_expert_grouped_gemm; do
  timeout 60 "$build/$test" > "$out/$test.log" 2>&1
  code=$?
  [ $code -eq 0 ] || { failed=1; tail -n 40 "$out/$test.log"; }
  echo "$test: exit code $code, $(grep -c '^\[       OK' "$out/$test.log") passed, $(grep -c '^\[  SKIPPED' "$out/$test.log") skipped lines"
done
[ $failed -eq 0 ] || exit 1
timeout 240 python3 bench/bench_grouped_gemm.py --library "$build/libbench_grouped_gemm.so" --rounds "$rounds" --json "$out/h200-grouped-gemm.json"
