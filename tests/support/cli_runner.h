// Runs the `moxie` program as a person would, in a folder of its own that is removed afterwards,
// and catches what it prints. Only for tests named test_cli_*: these know where the program lies
// (MOXIE_CLI_PATH).
#pragma once
#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/wait.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>
#include <string>
#include <vector>

namespace moxie::test {

struct CliResult {
  int code = -1;
  std::string out, err;
};

class CliTest : public ::testing::Test {
 protected:
  CliTest() {
    std::string name = (std::filesystem::temp_directory_path() / "moxie_cli_XXXXXX").string();
    folder_ = ::mkdtemp(name.data());
    std::filesystem::create_directory(folder_ / "work");
  }
  ~CliTest() override {
    std::error_code ignored;
    std::filesystem::remove_all(folder_, ignored);
  }

  // `arguments` as typed in a shell, in the folder path("").
  CliResult moxie(const std::string& arguments) const {
    const std::string command = "cd '" + path("").string() + "' && '" MOXIE_CLI_PATH "' " +
                                arguments + " >'" + (folder_ / "out").string() + "' 2>'" +
                                (folder_ / "err").string() + "' </dev/null";
    const int status = std::system(command.c_str());
    return {WIFEXITED(status) ? WEXITSTATUS(status) : 128, content(folder_ / "out"),
            content(folder_ / "err")};
  }
  std::filesystem::path path(const std::string& name) const { return folder_ / "work" / name; }
  void write(const std::string& name, const std::string& text) const {
    std::ofstream(path(name), std::ios::binary) << text;
  }
  std::string read(const std::string& name) const { return content(path(name)); }
  // Everything in the folder, temporary files included.
  std::set<std::string> files() const {
    std::set<std::string> names;
    for (const auto& entry : std::filesystem::recursive_directory_iterator(path(""))) {
      names.insert(std::filesystem::relative(entry.path(), path("")).string());
    }
    return names;
  }
  // Exit code, one line on standard error that starts with "moxie: " and has every part of it,
  // nothing on standard output.
  void expect_error(const std::string& arguments, int code,
                    const std::vector<std::string>& parts) const {
    SCOPED_TRACE("moxie " + arguments);
    const CliResult result = moxie(arguments);
    EXPECT_EQ(result.code, code) << result.err;
    EXPECT_EQ(result.out, "");
    EXPECT_TRUE(result.err.starts_with("moxie: ")) << result.err;
    EXPECT_EQ(std::count(result.err.begin(), result.err.end(), '\n'), 1) << result.err;
    for (const std::string& part : parts) {
      EXPECT_NE(result.err.find(part), std::string::npos)
          << "'" << part << "' is not in: " << result.err;
    }
  }

 private:
  static std::string content(const std::filesystem::path& file) {
    std::ostringstream text;
    text << std::ifstream(file, std::ios::binary).rdbuf();
    return text.str();
  }
  std::filesystem::path folder_;
};

// A layer small enough for a test that starts the program many times.
inline const std::string kSmall =
    "--hidden 64 --intermediate 64 --experts 6 --top-k 2 --shared-intermediate 64 --repeat 1 "
    "--timeout 60 ";

}  // namespace moxie::test
