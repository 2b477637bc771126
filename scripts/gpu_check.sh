#!/bin/bash
# Tests and benchmarks of the CUDA side on Hopper GPUs; the tables come last.
#
#   scripts/gpu_check.sh [folder with the programs, default build-gpu] [folder for results, default the same]
#
# Builds the programs when they are missing and nvcc is here, by the CMake preset `portable`: they need nothing of the
# machine they run on but its driver (CUDA runtime, C++ runtime and fmt are inside, oneDNN is left out). So they can be
# built on one machine and run on another that has a GPU, PyTorch and no packages of ours. What is carried is the folder:
#   moxie                        the command
#   moxie_gpu_tests              all of tests/gpu
#   libbench_grouped_gemm.so     for bench/bench_grouped_gemm.py
# After a change: remove the folder. Every program runs under a time limit: a kernel that hangs must not hold the machine.
# Environment: COMMIT (what result files call these sources where there is no git), ROUNDS, TEST_SECONDS, BENCH_SECONDS, SCALING_SECONDS (of each scaling scenario:
# some seventy rows), JOBS
set -u
cd "$(dirname "$0")/.."
programs=${1:-build-gpu}
out=${2:-$programs}
rounds=${ROUNDS:-5}
mkdir -p "$programs" "$out"

build_all() {
  local tree=build/portable
  mkdir -p build
  cmake --preset portable > build/portable.log 2>&1 || { cat build/portable.log; return 1; }
  cmake --build --preset portable -j "${JOBS:-$(nproc)}" --target moxie_cli moxie_gpu_tests bench_grouped_gemm || return 1
  cp "$tree/bin/moxie" "$tree/tests/moxie_gpu_tests" "$tree/bench/libbench_grouped_gemm.so" "$programs/" &&
    strip --strip-debug "$programs"/moxie "$programs"/moxie_gpu_tests "$programs"/libbench_grouped_gemm.so
}
if [ ! -e "$programs/moxie" ] && command -v nvcc > /dev/null; then build_all || exit 1; fi

export MOXIE_PLAN_CACHE=off  # plans are those of the tests and scenarios
timeout 60 "$programs/moxie" doctor || exit 1
failed=0
for suite in $("$programs/moxie_gpu_tests" --gtest_list_tests | grep '^[A-Za-z0-9_/]*\.'); do
  # One process for each suite: a hang ends only that one.
  log="$out/test_${suite//[\/.]/}.log"
  timeout "${TEST_SECONDS:-120}" "$programs/moxie_gpu_tests" --gtest_filter="$suite*" > "$log" 2>&1
  code=$?
  [ $code -eq 0 ] || { failed=1; tail -n 40 "$log"; }
  echo "${suite%.}: exit code $code, $(grep -c '^\[       OK' "$log") passed, $(grep -c '^\[  SKIPPED' "$log") skipped lines"
done
[ $failed -eq 0 ] || exit 1
gpus=$(nvidia-smi -L 2> /dev/null | wc -l)
[ "$gpus" -gt 0 ] || { echo "no GPU: nothing was timed"; exit 0; }
scenarios="h200-forward h200-backward h200-rank-backward"
[ "$gpus" -gt 1 ] && scenarios="h200x2-forward h200x2-backward"
[ "$gpus" -gt 2 ] && scenarios="$scenarios h200-scaling-forward h200-scaling-backward"
timeout "${BENCH_SECONDS:-300}" python3 bench/bench_grouped_gemm.py --library "$programs/libbench_grouped_gemm.so" --rounds "$rounds" \
  ${COMMIT:+--commit "$COMMIT"} --json "$out/h200-grouped-gemm.json" || exit 1
timeout "${BENCH_SECONDS:-300}" python3 bench/bench_grouped_gemm.py --library "$programs/libbench_grouped_gemm.so" --rounds "$rounds" \
  --products wgrad-down wgrad-gate wgrad-gate-add wgrads dx dgrad ${COMMIT:+--commit "$COMMIT"} --json "$out/h200-backward-gemm.json" || exit 1
for scenario in $scenarios; do
  case $scenario in *scaling*) limit=${SCALING_SECONDS:-1800} ;; *) limit=${BENCH_SECONDS:-300} ;; esac
  timeout "$limit" "$programs/moxie" bench layer --scenario "bench/scenarios/$scenario.json" --rounds "$rounds" \
    ${COMMIT:+--commit "$COMMIT"} --json "$out/$scenario.json" || exit 1
done
