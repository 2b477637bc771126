#!/bin/bash
# Tests and benchmarks of the CUDA side on Hopper GPUs; the tables come last.
#
#   scripts/gpu_check.sh [folder with the binaries, default build-gpu] [folder for results, default the same]
#
# Builds what is missing when nvcc and GoogleTest are here, and binaries that need nothing of this machine: static CUDA
# runtime, GoogleTest and C++ runtime, header-only fmt, no oneDNN. So they can be built on one machine and run on another
# that has a GPU, PyTorch and no packages of ours. After a change: remove the folder. Every program runs under a time
# limit: a kernel that hangs must not hold the machine.
set -u
cd "$(dirname "$0")/.."
build=${1:-build-gpu}
out=${2:-$build}
rounds=${ROUNDS:-5}
jobs=${JOBS:-$(nproc)}
mkdir -p "$build/obj" "$out"

common="-std=c++20 -I. -DMOXIE_HAS_CUDA=1 -DMOXIE_VERSION=\\\"gpu_check\\\""
export cxx="g++ $common -O1 -fPIC -ffp-contract=off -DFMT_HEADER_ONLY -I${CUDA_HOME:-/usr/local/cuda}/include"
export nvcc="nvcc $common -O3 -gencode=arch=compute_90a,code=sm_90a --expt-relaxed-constexpr -lineinfo -Xcompiler=-Wall,-ffp-contract=off,-fPIC"
export build
compile() {  # SOURCE -> object, named after its path
  local object="$build/obj/${1//\//_}.o"
  [ -e "$object" ] && return
  echo "$1"
  case $1 in
    *.cu) eval "$nvcc -c $1 -o $object" ;;
    *) eval "$cxx -c $1 -o $object" ;;
  esac
}
export -f compile
build_all() {
  local link="nvcc -gencode=arch=compute_90a,code=sm_90a -cudart static -Xcompiler -static-libstdc++,-static-libgcc"
  local gtest="/usr/lib/x86_64-linux-gnu/libgtest.a /usr/lib/x86_64-linux-gnu/libgtest_main.a" o="$build/obj"
  printf '%s\n' moxie/*/*.cu moxie/*.cpp moxie/*/*.cpp tests/support/*.cpp tests/oracle/*.cpp tests/gpu/test_* bench/*.cu |
    xargs -P "$jobs" -I{} bash -c 'compile {} || exit 255' || return 1
  for test in "$o"/tests_gpu_test_*.o; do
    local name=${test##*/tests_gpu_}
    $link "$test" "$o"/tests_support_*.o "$o"/tests_oracle_*.o "$o"/moxie_*.o -o "$build/${name%%.*}" $gtest -lpthread -ldl -lrt || return 1
  done
  for bench in "$o"/bench_bench_*.o; do
    local name=${bench##*/bench_}
    $link -shared "$bench" "$o"/moxie_*.o -o "$build/lib${name%%.*}.so" -lpthread -ldl -lrt || return 1
  done
}
if [ ! -e "$build/libbench_layer_cuda.so" ] && command -v nvcc > /dev/null; then build_all || exit 1; fi

failed=0
for program in "$build"/test_*; do
  name=${program##*/}
  timeout "${TEST_SECONDS:-120}" "$program" > "$out/$name.log" 2>&1
  code=$?
  [ $code -eq 0 ] || { failed=1; tail -n 40 "$out/$name.log"; }
  echo "$name: exit code $code, $(grep -c '^\[       OK' "$out/$name.log") passed, $(grep -c '^\[  SKIPPED' "$out/$name.log") skipped lines"
done
[ $failed -eq 0 ] || exit 1
gpus=$(nvidia-smi -L 2> /dev/null | wc -l)
[ "$gpus" -gt 0 ] || { echo "no GPU: nothing was timed"; exit 0; }
timeout 240 python3 bench/bench_grouped_gemm.py --library "$build/libbench_grouped_gemm.so" --rounds "$rounds" --json "$out/h200-grouped-gemm.json" || exit 1
timeout 240 python3 bench/bench_layer_cuda.py --library "$build/libbench_layer_cuda.so" --devices $(seq 0 $((gpus - 1))) --rounds "$rounds" --json "$out/h200x$gpus-forward.json"
