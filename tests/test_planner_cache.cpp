// The plan cache: what is stored is found again under the same key and no other; what cannot be
// used is ignored with the reason; a file is replaced as a whole.
#include <gtest/gtest.h>
#include <stdlib.h>

#include <filesystem>
#include <fstream>
#include <sstream>

#include "moxie/core/environment.h"
#include "moxie/planner/plan_cache.h"
#include "tests/support/expect_error.h"

namespace moxie::planner {
namespace {

namespace fs = std::filesystem;
using test::expect_error;

Problem a_problem() {
  Problem p;
  p.num_ranks = 2;
  p.max_tokens = 300;
  p.hidden = 512;
  p.intermediate = 256;
  p.num_experts = 6;
  p.top_k = 2;
  p.activation = {ActivationKind::gpt_oss, 7.0f, 1.702f};
  return p;
}
MachineId a_machine() {
  return {.backend = "cuda",
          .device = "NVIDIA H200",
          .num_sms = 132,
          .ranks_of_devices = {1, 1},
          .driver = "13.0",
          .runtime = "13.0"};
}
PlanKey a_key() { return {a_problem(), a_machine(), Passes::forward}; }
Plan a_plan() { return {.order = TaskOrder::lag, .lag_bands = 3, .comm_workers = 8}; }

class PlannerCache : public ::testing::Test {
 protected:
  PlannerCache() {
    std::string name = (fs::temp_directory_path() / "moxie_cache_XXXXXX").string();
    folder_ = ::mkdtemp(name.data());
    file_ = (folder_ / "new" / "plans.json").string();
  }
  ~PlannerCache() override {
    std::error_code ignored;
    fs::remove_all(folder_, ignored);
  }
  std::string text() const {
    std::ostringstream all;
    all << std::ifstream(file_).rdbuf();
    return all.str();
  }
  void write(const std::string& content) const {
    fs::create_directories(fs::path(file_).parent_path());
    std::ofstream(file_) << content;
  }
  // Not found, and the words say why.
  void expect_ignored(const std::string& words) const {
    const CachedPlan found = find_plan(file_, a_key());
    EXPECT_FALSE(found.plan.has_value());
    EXPECT_NE(found.words.find(words), std::string::npos) << found.words;
  }
  // The stored plan with one field changed is ignored for that reason.
  void expect_plan_ignored(const char* field, const nlohmann::json& value,
                           const std::string& words) {
    auto json = nlohmann::json::parse(text());
    json["entries"][0]["plan"][field] = value;
    SCOPED_TRACE(field);
    const std::string before = text();
    write(json.dump());
    expect_ignored(words);
    write(before);
  }

  fs::path folder_;
  std::string file_;
};

TEST_F(PlannerCache, WhatIsStoredIsFoundAgain) {
  expect_ignored("does not exist");
  store_plan(file_, a_key(), a_plan(), {{"plan_ms", 1.5}});
  const CachedPlan found = find_plan(file_, a_key());
  ASSERT_TRUE(found.plan.has_value()) << found.words;
  EXPECT_EQ(*found.plan, pipeline::resolve(a_problem(), a_plan()));
  EXPECT_NE(found.words.find(file_), std::string::npos);
  EXPECT_NE(text().find("\"plan_ms\": 1.5"), std::string::npos);
  EXPECT_EQ(std::distance(fs::directory_iterator(fs::path(file_).parent_path()), {}), 1)
      << "a temporary file was left";
}

TEST_F(PlannerCache, ALaterPlanReplacesTheEarlierOneAndNoOther) {
  PlanKey other = a_key();
  other.problem.max_tokens = 301;
  store_plan(file_, other, {}, {});
  store_plan(file_, a_key(), {}, {});
  store_plan(file_, a_key(), a_plan(), {});
  EXPECT_EQ(nlohmann::json::parse(text())["entries"].size(), 2u);
  EXPECT_EQ(find_plan(file_, a_key()).plan->order, TaskOrder::lag);
  EXPECT_EQ(find_plan(file_, other).plan->order, TaskOrder::slabs);
}

// Every part of the key counts.
TEST_F(PlannerCache, AnotherLayerOrMachineFindsNothing) {
  store_plan(file_, a_key(), a_plan(), {});
  std::vector<PlanKey> others;
  const auto other = [&](auto change) {
    others.push_back(a_key());
    change(others.back());
  };
  other([](PlanKey& k) { k.problem.max_tokens = 299; });
  other([](PlanKey& k) { k.problem.hidden = 576; });
  other([](PlanKey& k) { k.problem.intermediate = 320; });
  other([](PlanKey& k) { k.problem.num_experts = 7; });
  other([](PlanKey& k) { k.problem.top_k = 3; });
  other([](PlanKey& k) { k.problem.dtype = DType::f32; });
  other([](PlanKey& k) { k.problem.activation.kind = ActivationKind::swiglu; });
  other([](PlanKey& k) { k.problem.activation.alpha = 1.5f; });
  other([](PlanKey& k) { k.problem.expert_bias = true; });
  other([](PlanKey& k) { k.problem.shared.intermediate = 64; });
  other([](PlanKey& k) { k.machine.backend = "cpu"; });
  other([](PlanKey& k) { k.machine.device = "NVIDIA H100 80GB HBM3"; });
  other([](PlanKey& k) { k.machine.num_sms = 114; });
  other([](PlanKey& k) { k.machine.ranks_of_devices = {2}; });
  other([](PlanKey& k) { k.machine.reserve_sms = 8; });
  other([](PlanKey& k) { k.machine.cluster_size = 1; });
  other([](PlanKey& k) { k.machine.driver = "13.1"; });
  other([](PlanKey& k) { k.machine.runtime = "12.9"; });
  other([](PlanKey& k) { k.passes = Passes::both; });
  for (const PlanKey& key : others) {
    const CachedPlan found = find_plan(file_, key);
    EXPECT_FALSE(found.plan.has_value()) << to_json(key).dump();
    EXPECT_NE(found.words.find("no entry"), std::string::npos) << found.words;
  }
}

TEST_F(PlannerCache, AnotherVersionFindsNothingAndItsEntryIsReplaced) {
  store_plan(file_, a_key(), a_plan(), {});
  auto json = nlohmann::json::parse(text());
  json["entries"][0]["key"]["moxie"] = "0.0.1";
  write(json.dump());
  expect_ignored("no entry");
  store_plan(file_, a_key(), {}, {});
  EXPECT_EQ(nlohmann::json::parse(text())["entries"].size(), 1u);
}

TEST_F(PlannerCache, AFileThatIsNoCacheIsIgnoredAndNotOverwritten) {
  for (const auto& [content, words] :
       {std::pair{"{\"format\": 1, \"entries\": [", "no JSON object"},
        std::pair{"", "no JSON object"}, std::pair{"[1, 2]", "no JSON object"},
        std::pair{"{\"entries\": []}", "format is missing"},
        std::pair{"{\"format\": 99, \"entries\": []}", "format is 99, must be 1"},
        std::pair{"{\"format\": 1}", "no list 'entries'"}}) {
    SCOPED_TRACE(content);
    write(content);
    expect_ignored(words);
    expect_error(ErrorCode::unavailable, {file_, words, "name another file"},
                 [&] { store_plan(file_, a_key(), {}, {}); });
    EXPECT_EQ(text(), content);
  }
  write("{\"format\": 1, \"entries\": [7, {}, {\"key\": 3}]}");
  expect_ignored("no entry");
}

TEST_F(PlannerCache, APlanThatIsNotLegalIsIgnoredWithTheRule) {
  store_plan(file_, a_key(), a_plan(), {});
  expect_plan_ignored("lag_bands", 0, "plan.lag_bands is 0, must be between 1");
  expect_plan_ignored("x_ring_blocks", 1, "plan.x_ring_blocks is 1");
  expect_plan_ignored("capacity_rows", 1000, "must be a multiple of 128");
  expect_plan_ignored("comm_workers", 100000, "plan.comm_workers is 100000");
  expect_plan_ignored("num_slabs", -4, "plan.num_slabs is -4");
  expect_plan_ignored("num_slabs", 1e300, "must be a whole number");
  expect_plan_ignored("num_slabs", "many", "num_slabs is \"many\", must be a whole number");
  expect_plan_ignored("order", "sideways", "must be one of slabs, lag");
  expect_plan_ignored("speed", 11, "speed is no part of a plan");
  auto json = nlohmann::json::parse(text());
  json["entries"][0]["plan"].erase("mode");
  write(json.dump());
  expect_ignored("mode is missing");
  json["entries"][0].erase("plan");
  write(json.dump());
  expect_ignored("is no JSON object");
}

TEST_F(PlannerCache, WhatCannotBeStoredIsRefused) {
  Plan illegal = a_plan();
  illegal.num_slabs = 0;
  expect_error(ErrorCode::invalid_plan, {"num_slabs is 0", "nearest legal value 1"},
               [&] { store_plan(file_, a_key(), illegal, {}); });
  EXPECT_FALSE(fs::exists(file_));
  expect_error(ErrorCode::unavailable, {"/dev/null/plans.json", "cannot be written"},
               [&] { store_plan("/dev/null/plans.json", a_key(), {}, {}); });
}

TEST_F(PlannerCache, TheOptionComesBeforeTheEnvironment) {
  ::setenv("MOXIE_PLAN_CACHE", "/somewhere/p.json", 1);
  EXPECT_EQ(plan_cache_file("mine.json"), "mine.json");
  EXPECT_EQ(plan_cache_file(), "/somewhere/p.json");
  EXPECT_EQ(plan_cache_file("off"), "");
  ::setenv("MOXIE_PLAN_CACHE", "off", 1);
  EXPECT_EQ(plan_cache_file(), "");
  ::unsetenv("MOXIE_PLAN_CACHE");
  ::setenv("XDG_CACHE_HOME", "/xdg", 1);
  EXPECT_EQ(plan_cache_file(), "/xdg/moxie/plans.json");
  ::unsetenv("XDG_CACHE_HOME");
  ::setenv("HOME", "/a/home", 1);
  EXPECT_EQ(plan_cache_file(), "/a/home/.cache/moxie/plans.json");
}

}  // namespace
}  // namespace moxie::planner
