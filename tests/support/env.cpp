#include "tests/support/env.h"

#include <errno.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <iostream>
#include <random>
#include <string>

namespace moxie::test {
namespace {

std::uint64_t fresh_or_given_seed() {
  if (const char* text = std::getenv("MOXIE_TEST_SEED")) return std::strtoull(text, nullptr, 10);
  std::random_device device;
  return device();
}

HostGemm gemm_choice() {
  const char* text = std::getenv("MOXIE_TEST_GEMM");
  const std::string word = text ? text : "automatic";
  if (word == "plain") return HostGemm::plain;
  if (word == "onednn") return HostGemm::onednn;
  EXPECT_EQ(word, "automatic") << "MOXIE_TEST_GEMM must be automatic, onednn or plain";
  return HostGemm::automatic;
}

const char* program_name() {
#ifdef __GLIBC__
  return program_invocation_name;
#else
  return "<this program>";
#endif
}

}  // namespace

std::uint64_t test_seed() {
  static const std::uint64_t seed = fresh_or_given_seed();
  static const ::testing::TestInfo* printed_for = nullptr;
  const auto* info = ::testing::UnitTest::GetInstance()->current_test_info();
  if (info != nullptr && info != printed_for) {
    printed_for = info;
    std::cout << "[   SEED   ] MOXIE_TEST_SEED=" << seed << " " << program_name()
              << " --gtest_filter='" << info->test_suite_name() << "." << info->name() << "'"
              << std::endl;
  }
  return seed;
}

std::int64_t num_passes(std::int64_t fallback) {
  const char* text = std::getenv("MOXIE_TEST_PASSES");
  return text ? std::strtoll(text, nullptr, 10) : fallback;
}

std::int32_t late_ms(std::int32_t fallback) {
  const char* text = std::getenv("MOXIE_TEST_LATE_MS");
  return text ? static_cast<std::int32_t>(std::strtol(text, nullptr, 10)) : fallback;
}

WorldOptions world_options(std::int64_t num_ranks) {
  WorldOptions options;
  options.num_ranks = num_ranks;
  options.timeout_s = 60;
  options.gemm = gemm_choice();
  options.faults.poison_workspace = true;
  return options;
}

World make_world(const WorldOptions& options) { return World::cpu(options); }

}  // namespace moxie::test
