#include "moxie/transport/nccl_library.h"

#include <dlfcn.h>
#include <fmt/format.h>
#include <link.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <string_view>

#include "moxie/core/environment.h"
#include "moxie/core/error.h"

namespace moxie::transport {
namespace {

constexpr const char* kFileName = "libnccl.so.2";
// What a World calls, beside ncclGetVersion.
constexpr std::array kFunctions = {
    "ncclGetUniqueId",
    "ncclGetErrorString",
    "ncclGetLastError",
    "ncclCommInitRankConfig",
    "ncclCommSplit",
    "ncclCommGetAsyncError",
    "ncclCommAbort",
    "ncclCommCount",
    "ncclCommUserRank",
    "ncclCommCuDevice",
    "ncclMemAlloc",
    "ncclMemFree",
    "ncclTeamLsa",
    "ncclCommWindowRegister",
    "ncclCommWindowDeregister",
};

std::string real_file(const std::string& file) {
  std::error_code error;
  const auto path = std::filesystem::canonical(file, error);
  return error ? file : path.string();
}

// The file that a function lies in.
std::string file_of(void* function) {
  Dl_info info{};
  return dladdr(function, &info) != 0 && info.dli_fname != nullptr ? info.dli_fname : "";
}

int version_of(void* handle) {
  int version = 0;
  if (auto* get = reinterpret_cast<int (*)(int*)>(dlsym(handle, "ncclGetVersion"))) get(&version);
  return version;
}

struct Candidate {
  void* handle = nullptr;
  NcclReport report;
};

Candidate find(const std::string& option) {
  Candidate c;
  const std::vector<std::string> loaded = loaded_nccl_files();
  const auto two = [&](const std::string& a, const std::string& b) {
    c.report.problem = fmt::format(
        "two NCCL libraries meet in this process, {} and {}, must be one: they would share GPUs "
        "without knowing of each other; give the World the path of the one that is loaded, or load "
        "neither before",
        a, b);
    return c;
  };
  if (loaded.size() > 1) return two(loaded[0], loaded[1]);
  const std::string wanted = nccl_library_file(option);
  if (!wanted.empty() && !loaded.empty() && real_file(wanted) != real_file(loaded[0]))
    return two(loaded[0], wanted);
  const std::string file = !wanted.empty() ? wanted : !loaded.empty() ? loaded[0] : kFileName;
  c.handle = dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (c.handle == nullptr) {
    const char* reason = dlerror();
    c.report.problem = fmt::format(
        "NCCL cannot be loaded: {}; install NCCL {} or newer, or name its file in "
        "MOXIE_NCCL_LIBRARY",
        reason == nullptr ? file : reason, nccl_words(kNeededNccl));
    return c;
  }
  void* version_function = dlsym(c.handle, "ncclGetVersion");
  c.report.path = version_function != nullptr ? file_of(version_function) : file;
  c.report.version = version_of(c.handle);
  if (c.report.version < kNeededNccl) {
    c.report.problem =
        fmt::format("NCCL at {} is version {}, must be {} or newer; nearest legal value {}",
                    c.report.path, c.report.version == 0 ? "unknown" : nccl_words(c.report.version),
                    nccl_words(kNeededNccl), nccl_words(kNeededNccl));
    return c;
  }
  std::vector<const char*> needed(kFunctions.begin(), kFunctions.end());
  if (c.report.version >= kNcclWithHostPointers) needed.push_back("ncclGetLsaDevicePointer");
  for (const char* name : needed) {
    if (dlsym(c.handle, name) != nullptr) continue;
    c.report.problem = fmt::format("NCCL {} at {} has no {}, must have it; install a complete NCCL",
                                   nccl_words(c.report.version), c.report.path, name);
    return c;
  }
  return c;
}

}  // namespace

std::string nccl_words(int version) {
  return fmt::format("{}.{}.{}", version / 10000, version % 10000 / 100, version % 100);
}

std::vector<std::string> loaded_nccl_files() {
  std::vector<std::string> files;
  dl_iterate_phdr(
      [](dl_phdr_info* info, std::size_t, void* list) {
        const std::string_view file = info->dlpi_name;
        const std::string_view name = file.substr(file.rfind('/') + 1);
        if (name == "libnccl.so" || name.starts_with("libnccl.so."))
          static_cast<std::vector<std::string>*>(list)->emplace_back(file);
        return 0;
      },
      &files);
  return files;
}

NcclLibrary NcclLibrary::load(const std::string& path) {
  Candidate c = find(path);
  if (!c.report.problem.empty()) {
    if (c.handle != nullptr) dlclose(c.handle);
    throw Error(ErrorCode::unavailable, c.report.problem);
  }
  NcclLibrary library;
  library.handle_ = c.handle;  // never closed: NCCL keeps threads
  library.path_ = c.report.path;
  library.version_ = c.report.version;
  return library;
}

void* NcclLibrary::symbol(const char* name) const { return dlsym(handle_, name); }

NcclReport examine_nccl(const std::string& path) {
  const Candidate c = find(path);
  if (c.handle != nullptr && !c.report.problem.empty()) dlclose(c.handle);
  return c.report;
}

}  // namespace moxie::transport
