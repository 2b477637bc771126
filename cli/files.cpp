// Reading whole files, writing them atomically, staging folders.
#include "cli/files.h"

#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <sstream>

#include "cli/errors.h"

namespace moxie::cli {
namespace fs = std::filesystem;
namespace {

fs::path temporary_name(const fs::path& path) {
  fs::path name = path;
  name += fmt::format(".tmp{}", ::getpid());
  return name;
}

fs::path without_slash(const fs::path& path) {
  return path.has_filename() ? path : path.parent_path();
}

std::string last_error() { return std::strerror(errno); }

}  // namespace

std::string read_file(const fs::path& path) {
  std::error_code error;
  const fs::file_status status = fs::status(path, error);
  if (!fs::exists(status)) throw Failure(fmt::format("file {} does not exist", path.string()));
  if (fs::is_directory(status))
    throw Failure(fmt::format("{} is a folder; a file is needed", path.string()));
  errno = 0;
  std::ifstream stream(path, std::ios::binary);
  if (!stream)
    throw Failure(fmt::format("file {} cannot be read: {}", path.string(), last_error()));
  std::ostringstream content;
  content << stream.rdbuf();
  return std::move(content).str();
}

void write_file(const fs::path& path, std::string_view content) {
  const fs::path temporary = temporary_name(path);
  errno = 0;
  std::ofstream stream(temporary, std::ios::binary | std::ios::trunc);
  if (!stream)
    throw Failure(fmt::format("file {} cannot be written: {}", path.string(), last_error()));
  stream.write(content.data(), static_cast<std::streamsize>(content.size()));
  stream.close();
  std::error_code error;
  if (!stream) {
    const std::string reason = last_error();
    fs::remove(temporary, error);
    throw Failure(fmt::format("file {} cannot be written: {}", path.string(), reason));
  }
  fs::rename(temporary, path, error);
  if (error) {
    std::error_code ignored;
    fs::remove(temporary, ignored);
    throw Failure(fmt::format("file {} cannot be written: {}", path.string(), error.message()));
  }
}

void check_writable(const fs::path& path) {
  const fs::path folder = path.has_parent_path() ? path.parent_path() : fs::path(".");
  std::error_code error;
  if (!fs::is_directory(folder, error)) {
    throw Failure(fmt::format("{} cannot be written: folder {} does not exist", path.string(),
                              folder.string()));
  }
  if (fs::is_directory(path, error)) {
    throw Failure(fmt::format("{} cannot be written: it is a folder", path.string()));
  }
  if (::access(folder.c_str(), W_OK) != 0) {
    throw Failure(fmt::format("{} cannot be written: {}", path.string(), last_error()));
  }
}

void check_new_folder(const fs::path& path) {
  const fs::path folder = without_slash(path);
  std::error_code error;
  if (fs::exists(folder, error) &&
      !(fs::is_directory(folder, error) && fs::is_empty(folder, error))) {
    throw Failure(
        fmt::format("folder {} already exists; name a new or an empty one", folder.string()));
  }
  if (fs::exists(folder, error) && fs::equivalent(folder, fs::current_path(), error)) {
    throw Failure(fmt::format("{} is the current folder; name a new one", path.string()));
  }
  check_writable(temporary_name(folder));
}

fs::path source_tree() {
  std::error_code error;
  const fs::path program = fs::read_symlink("/proc/self/exe", error);
  for (fs::path folder = program.parent_path(); folder.has_relative_path();
       folder = folder.parent_path()) {
    if (fs::exists(folder / "moxie" / "moxie.h", error)) return folder;
  }
  return {};
}

StagedDir::StagedDir(fs::path destination) : destination_(without_slash(std::move(destination))) {
  check_new_folder(destination_);
  staging_ = temporary_name(destination_);
  std::error_code error;
  fs::create_directory(staging_, error);
  if (error)
    throw Failure(
        fmt::format("folder {} cannot be created: {}", destination_.string(), error.message()));
}

StagedDir::~StagedDir() {
  std::error_code ignored;
  if (!staging_.empty()) fs::remove_all(staging_, ignored);
}

void StagedDir::commit() {
  std::error_code error;
  fs::remove(destination_, error);  // an empty folder of that name, or nothing
  fs::rename(staging_, destination_, error);
  if (error)
    throw Failure(
        fmt::format("folder {} cannot be created: {}", destination_.string(), error.message()));
  staging_.clear();
}

}  // namespace moxie::cli
