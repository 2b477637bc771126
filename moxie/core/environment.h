// Every environment variable that Moxie or what it links reads, in one place; nothing else in the
// library or the command calls getenv. Options come first: a variable only says what no option did.
#pragma once
#include <span>
#include <string>

namespace moxie {

struct EnvironmentVariable {
  const char* name;
  const char* meaning;
  const char* value() const;  // null: not set
};
// What `moxie doctor` lists.
std::span<const EnvironmentVariable> environment_variables();

inline constexpr const char* kNoPlanCache = "off";
// The plan cache file: `option` when it is not empty, else MOXIE_PLAN_CACHE, else
// $XDG_CACHE_HOME/moxie/plans.json, else $HOME/.cache/moxie/plans.json. Empty: no cache ("off", or
// no home).
std::string plan_cache_file(const std::string& option = "");

// The NCCL library's file: `option` when it is not empty, else MOXIE_NCCL_LIBRARY. Empty: wherever
// the loader finds it.
std::string nccl_library_file(const std::string& option = "");

// MOXIE_UNDER_PROFILER is 1: passes on GPUs are launched so that ncu can replay them
// (CONTRIBUTING.md).
bool is_under_profiler();

}  // namespace moxie
