#include "moxie/core/environment.h"

#include <array>
#include <cstdlib>

namespace moxie {
namespace {

constexpr const char* kPlanCache = "MOXIE_PLAN_CACHE";
constexpr const char* kNcclLibrary = "MOXIE_NCCL_LIBRARY";
constexpr const char* kUnderProfiler = "MOXIE_UNDER_PROFILER";
constexpr std::array kVariables = {
    EnvironmentVariable{kPlanCache, "file of tuned plans, off: none [~/.cache/moxie/plans.json]"},
    EnvironmentVariable{kNcclLibrary, "file of NCCL [the one loaded already, else libnccl.so.2]"},
    EnvironmentVariable{kUnderProfiler,
                        "1: CUDA passes start without the cooperative attribute, so that ncu can "
                        "replay them; only on a GPU that nothing else uses"},
    EnvironmentVariable{"NCCL_NVLS_ENABLE",
                        "NCCL: World::nccl sets it to 0 (no multicast) where it is not set"},
    EnvironmentVariable{"XDG_CACHE_HOME", "folder of caches [~/.cache]"},
    EnvironmentVariable{"ONEDNN_MAX_CPU_ISA",
                        "oneDNN: caps the instruction set; other bits than without it"},
    EnvironmentVariable{"ONEDNN_VERBOSE", "oneDNN: prints each call"},
    EnvironmentVariable{"OMP_NUM_THREADS",
                        "no effect: each worker computes its tiles on its own thread"},
    EnvironmentVariable{"MOXIE_TEST_SEED", "tests only: rerun a random test with the same inputs"},
    EnvironmentVariable{"MOXIE_TEST_PASSES",
                        "tests only: number of shuffled passes of test_protocol"},
    EnvironmentVariable{"MOXIE_TEST_GEMM", "tests only: automatic | onednn | plain"},
};

std::string text_of(const char* variable) {
  const char* value = std::getenv(variable);
  return value == nullptr ? "" : value;
}

}  // namespace

const char* EnvironmentVariable::value() const { return std::getenv(name); }
std::span<const EnvironmentVariable> environment_variables() { return kVariables; }

std::string plan_cache_file(const std::string& option) {
  std::string file = option.empty() ? text_of(kPlanCache) : option;
  if (file == kNoPlanCache) return "";
  if (!file.empty()) return file;
  const std::string home = text_of("HOME");
  std::string folder = text_of("XDG_CACHE_HOME");
  if (folder.empty() && !home.empty()) folder = home + "/.cache";
  return folder.empty() ? "" : folder + "/moxie/plans.json";
}

std::string nccl_library_file(const std::string& option) {
  return option.empty() ? text_of(kNcclLibrary) : option;
}

bool is_under_profiler() { return text_of(kUnderProfiler) == "1"; }

}  // namespace moxie
