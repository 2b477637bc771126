// How NCCL is looked for, with libraries that stand for it, and what World::nccl refuses before it
// looks. Loaded libraries stay, so each case has a process of its own.
#include <dlfcn.h>
#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include <functional>

#include "moxie/moxie.h"
#include "moxie/transport/nccl_library.h"
#include "tests/support/expect_error.h"

namespace moxie::test {
namespace {

using transport::NcclLibrary;

std::string fake(const std::string& folder) {
  return std::string(MOXIE_FAKE_NCCL) + "/" + folder + "/libnccl.so.2";
}

// What `program` returns or throws, in a process of its own where MOXIE_NCCL_LIBRARY is not set.
std::string in_child(const std::function<std::string()>& program) {
  int ends[2] = {};
  EXPECT_EQ(::pipe(ends), 0);
  const pid_t process = ::fork();
  if (process == 0) {
    std::string words;
    try {
      ::unsetenv("MOXIE_NCCL_LIBRARY");
      words = program();
    } catch (const Error& error) {
      words = std::string(name(error.code())) + ": " + error.what();
    }
    const ssize_t sent = ::write(ends[1], words.data(), words.size());
    ::_exit(sent < 0 ? 1 : 0);
  }
  ::close(ends[1]);
  std::string words;
  char buffer[4096];
  for (ssize_t n = 0; (n = ::read(ends[0], buffer, sizeof(buffer))) > 0;)
    words.append(buffer, static_cast<std::size_t>(n));
  ::close(ends[0]);
  ::waitpid(process, nullptr, 0);
  return words;
}
std::string load(const std::string& path) {
  return in_child([&] {
    const NcclLibrary library = NcclLibrary::load(path);
    return transport::nccl_words(library.version()) + " at " + library.path();
  });
}
void expect_words(const std::string& text, const std::vector<std::string>& words) {
  for (const std::string& word : words)
    EXPECT_NE(text.find(word), std::string::npos) << "'" << word << "' is not in: " << text;
}

TEST(NcclLibrary, IsFoundByPathOrVariable) {
  EXPECT_EQ(load(fake("good")), "2.28.9 at " + fake("good"));
  EXPECT_EQ(load(fake("other")), "2.29.3 at " + fake("other"));
  EXPECT_EQ(in_child([] {
              ::setenv("MOXIE_NCCL_LIBRARY", fake("good").c_str(), 1);
              return NcclLibrary::load().path();
            }),
            fake("good"));
}

TEST(NcclLibrary, TheOneThatIsLoadedAlreadyIsUsed) {
  EXPECT_EQ(in_child([] {
              if (dlopen(fake("other").c_str(), RTLD_NOW) == nullptr) return std::string(dlerror());
              return NcclLibrary::load().path() + " " + NcclLibrary::load(fake("other")).path();
            }),
            fake("other") + " " + fake("other"));
}

TEST(NcclLibrary, TwoAreRefused) {
  // Both loaded already; and one loaded, another asked for.
  expect_words(in_child([] {
                 dlopen(fake("good").c_str(), RTLD_NOW);
                 dlopen(fake("other").c_str(), RTLD_NOW);
                 NcclLibrary::load();
                 return std::string("loaded");
               }),
               {"unavailable: two NCCL libraries", fake("good"), fake("other"), "must be one"});
  expect_words(in_child([] {
                 dlopen(fake("good").c_str(), RTLD_NOW);
                 NcclLibrary::load(fake("other"));
                 return std::string("loaded");
               }),
               {"unavailable: two NCCL libraries", fake("good"), fake("other"), "must be one"});
}

TEST(NcclLibrary, WhatCannotServeIsRefused) {
  expect_words(load(fake("old")), {"unavailable: NCCL at " + fake("old"), "is version 2.27.3",
                                   "must be 2.28.0 or newer"});
  expect_words(load(fake("incomplete")), {"unavailable: NCCL 2.28.9 at " + fake("incomplete"),
                                          "has no ncclCommWindowRegister"});
  expect_words(load("/nowhere/libnccl.so.2"),
               {"unavailable: NCCL cannot be loaded", "/nowhere/libnccl.so.2", "2.28.0",
                "MOXIE_NCCL_LIBRARY"});
  // What could not serve is not left behind.
  EXPECT_EQ(in_child([] {
              if (transport::examine_nccl(fake("old")).problem.empty()) return std::string("old");
              return NcclLibrary::load(fake("good")).path();
            }),
            fake("good"));
}

TEST(CudaWorld, HasNoMoreRanksThanOneOverNccl) {
  expect_error(ErrorCode::invalid_argument,
               {"num_ranks of a CUDA world is 65", "between 1 and 64", "nearest legal value 64"},
               [] { World::cuda({.num_ranks = 65, .timeout_s = 1}); });
}

TEST(NcclWorld, OptionsAreCheckedFirst) {
  const std::string id(128, 'x');
  int somebody = 0;
  const auto nccl = [](std::int64_t num_ranks, const NcclOptions& options) {
    World::nccl({.num_ranks = num_ranks, .timeout_s = 1}, options);
  };
  expect_error(ErrorCode::invalid_argument,
               {"num_ranks of a NCCL world is 65", "between 1 and 64", "nearest legal value 64"},
               [&] { nccl(65, {.unique_id = id}); });
  expect_error(ErrorCode::invalid_argument,
               {"rank of a NCCL world is 2", "between 0 and 1", "nearest legal value 1"},
               [&] { nccl(2, {.rank = 2, .unique_id = id}); });
  expect_error(ErrorCode::invalid_argument, {"rank of a NCCL world is -1", "nearest legal value 0"},
               [&] { nccl(2, {.rank = -1, .unique_id = id}); });
  expect_error(ErrorCode::invalid_argument,
               {"unique_id of a NCCL world has 5 bytes", "must have 128", "nccl_unique_id()"},
               [&] { nccl(2, {.unique_id = "short"}); });
  expect_error(ErrorCode::invalid_argument, {"unique_id and comm", "must be one of them"},
               [&] { nccl(2, {.unique_id = id, .comm = &somebody}); });
}

// Without CUDA in the build, or without a GPU in the machine: one sentence.
TEST(NcclWorld, NeedsAGpu) {
  const std::string words = in_child([] {
    const World world = World::nccl({.num_ranks = 2, .timeout_s = 1},
                                    {.unique_id = std::string(128, 'x'), .library = fake("good")});
    return std::string("made");
  });
  if (words.find("failed: NCCL") != std::string::npos) GTEST_SKIP() << "a GPU is here";
  expect_words(words, {"unavailable: World::nccl", "World::cpu_process"});
}

}  // namespace
}  // namespace moxie::test
