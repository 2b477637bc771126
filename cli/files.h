// Files that are either whole or absent: everything is written under a temporary name beside its
// destination and renamed when it is complete, so that an interrupted or failed run leaves nothing
// half-written.
#pragma once
#include <filesystem>
#include <string>
#include <string_view>

namespace moxie::cli {

// Throws Failure when the file is missing, a directory, or unreadable.
std::string read_file(const std::filesystem::path& path);
// Atomic: temporary file, then rename.
void write_file(const std::filesystem::path& path, std::string_view content);
// Throws Failure when `path` cannot be created (no such folder, a folder in its place): asked
// before hours of work.
void check_writable(const std::filesystem::path& path);

// Throws Failure when a folder `path` exists already and has something in it, or cannot be created:
// a dump never mixes with an older one.
void check_new_folder(const std::filesystem::path& path);

// The source tree that this program lies in (a folder above it has moxie/moxie.h); empty when it
// was installed elsewhere.
std::filesystem::path source_tree();

// A folder that is filled under a temporary name and appears under its own with commit(). Removed
// when never committed.
class StagedDir {
 public:
  explicit StagedDir(std::filesystem::path destination);
  StagedDir(const StagedDir&) = delete;
  StagedDir& operator=(const StagedDir&) = delete;
  ~StagedDir();
  const std::filesystem::path& path() const { return staging_; }
  void commit();

 private:
  std::filesystem::path destination_, staging_;
};

}  // namespace moxie::cli
