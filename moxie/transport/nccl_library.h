// NCCL as a library that is looked for when it is needed: nothing here is linked, so one build
// serves machines with and without it. A process must hold one NCCL only: where one is loaded
// already (by PyTorch, say), that one is used.
#pragma once
#include <string>
#include <vector>

namespace moxie::transport {

inline constexpr int kNeededNccl = 22800;  // windows: ncclCommWindowRegister, ncclTeamLsa
// From here on the host asks for peer addresses; before, a kernel reads them from the window.
inline constexpr int kNcclWithHostPointers = 22900;

std::string nccl_words(int version);  // 22809: "2.28.9"

class NcclLibrary {
 public:
  // The library at `path`; empty: MOXIE_NCCL_LIBRARY, else the one that is loaded already, else
  // libnccl.so.2 where the loader finds it. It stays loaded. Throws Error(unavailable) when there
  // is none, when it is older than needed or lacks a function, and when the process would hold two.
  static NcclLibrary load(const std::string& path = "");

  const std::string& path() const { return path_; }
  int version() const { return version_; }
  void* symbol(const char* name) const;  // null: not there

 private:
  void* handle_ = nullptr;
  std::string path_;
  int version_ = 0;
};

// What load() would say, for `moxie doctor`; a library without a problem stays loaded.
struct NcclReport {
  std::string path;     // empty: none found
  int version = 0;      // 0: unknown
  std::string problem;  // why load() throws; empty: it does not
};
NcclReport examine_nccl(const std::string& path = "");

// The files of the NCCL libraries that this process has loaded.
std::vector<std::string> loaded_nccl_files();

}  // namespace moxie::transport
