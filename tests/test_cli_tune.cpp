// `moxie tune` on the CPU: measures plans, keeps one or the default, stores it where a layer finds
// it; wrong command lines and files are refused; `moxie doctor --record` refuses without CUDA.
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "tests/support/cli_runner.h"

namespace moxie::test {
namespace {

const std::string kLayer =
    "--hidden 64 --intermediate 64 --experts 6 --top-k 2 --shared-intermediate 64 --tokens 40,0 ";

class CliTune : public CliTest {};

TEST_F(CliTune, MeasuresStoresAndIsFoundByALayer) {
  const CliResult result = moxie("tune " + kLayer +
                                 "--rounds 3 --candidates 2 --cache c.json --json r.json "
                                 "--commit abc");
  ASSERT_EQ(result.code, 0) << result.err;
  for (const char* word :
       {"default", "nothing: the noise", "all the same bits", "  kept  ", "stored in c.json"}) {
    EXPECT_NE(result.out.find(word), std::string::npos) << word << " in\n" << result.out;
  }
  const auto report = nlohmann::json::parse(read("r.json"));
  EXPECT_EQ(report["commit"], "abc");
  const auto& row = report["rows"][0];
  ASSERT_EQ(row["plans"].size(), 3u);
  EXPECT_EQ(row["plans"][0]["what"], "default");
  for (const auto& plan : row["plans"]) {
    EXPECT_TRUE(plan["predicted_ms"].is_null());  // the record is not of a CPU
    EXPECT_EQ(plan["burst"]["samples"].size(), 3u);
    EXPECT_LE(plan["burst"]["ratio"]["p10"], plan["burst"]["ratio"]["p90"]);
  }
  EXPECT_EQ(row["plans"][0]["burst"]["ratio"]["median"], 1.0);
  EXPECT_LT(row["max_rel_l2"].get<double>(), 1e-2);
  EXPECT_GT(row["max_rel_l2"].get<double>(), 1e-5);
  // The winner is no slower than the default plan by what was measured.
  const auto cache = nlohmann::json::parse(read("c.json"));
  const auto& entry = cache["entries"][0];
  EXPECT_LE(entry["measured"]["plan_ms"], entry["measured"]["default_ms"]);
  EXPECT_EQ(entry["key"]["passes"], "forward");
  EXPECT_EQ(entry["key"]["machine"]["backend"], "cpu");

  // `moxie run` of the same layer says where its plan is from.
  const std::string run =
      "run " + kLayer + "--ranks 2 --routing uniform --repeat 1 --forward-only ";
  write("env", "");
  const CliResult found = moxie(run + "--plan-cache c.json --json -");
  ASSERT_EQ(found.code, 0) << found.err;
  const auto source = nlohmann::json::parse(found.out)["plan_source"];
  EXPECT_EQ(source["origin"], "cache");
  EXPECT_EQ(source["words"], "plan cache c.json");
  EXPECT_NE(moxie(run + "--plan-cache c.json").out.find("from plan cache c.json"),
            std::string::npos);
  const CliResult own = moxie(run + "--plan-cache c.json --slabs 1 --json -");
  EXPECT_EQ(nlohmann::json::parse(own.out)["plan_source"]["origin"], "caller");
  const CliResult none = moxie(run + "--plan-cache off --json -");
  EXPECT_EQ(nlohmann::json::parse(none.out)["plan_source"]["origin"], "default");
}

// What forward's tuning found is where backward's begins, and a layer finds the plan for both
// passes.
TEST_F(CliTune, BackwardTunesWhatTrainingTakes) {
  const std::string layer = kLayer + "--rounds 3 --cache c.json --commit abc ";
  ASSERT_EQ(moxie("tune " + layer + "--candidates 1").code, 0);
  auto cache = nlohmann::json::parse(read("c.json"));
  ASSERT_EQ(cache["entries"].size(), 1u);
  cache["entries"][0]["plan"]["band_blocks"] = 3;  // as if it had won
  write("c.json", cache.dump());

  const CliResult result =
      moxie("tune --direction backward " + layer + "--candidates 8 --json r.json");
  ASSERT_EQ(result.code, 0) << result.err;
  EXPECT_NE(result.out.find("forward and backward: "), std::string::npos) << result.out;
  const auto row = nlohmann::json::parse(read("r.json"))["rows"][0];
  EXPECT_EQ(row["direction"], "backward");
  EXPECT_EQ(row["passes"], "both");
  EXPECT_EQ(row["plans"][0]["what"], "default");
  EXPECT_EQ(row["plans"][1]["what"], "band_blocks 3");
  const auto& plain = row["plans"][0]["plan"];
  std::set<std::string> differing;
  std::map<std::string, std::int64_t> memory;  // by what is saved
  for (const auto& plan : row["plans"]) {
    EXPECT_EQ(plan["burst"]["samples"].size(), 3u);
    for (const auto& [key, value] : plan["plan"].items())
      if (value != plain[key]) differing.insert(key);
    memory[plan["plan"]["save"]] = plan["memory_bytes"];
  }
  for (const char* knob :
       {"save", "minibatch_blocks", "lag_chunks", "chunk_blocks", "backward_ring_blocks"})
    EXPECT_TRUE(differing.contains(knob)) << knob << " in " << row["plans"].dump(1);
  for (const char* knob : {"order", "num_slabs", "x_ring_blocks", "capacity_rows"})
    EXPECT_FALSE(differing.contains(knob)) << knob;
  EXPECT_LT(memory.at("none"), memory.at("z"));

  cache = nlohmann::json::parse(read("c.json"));
  ASSERT_EQ(cache["entries"].size(), 2u);
  EXPECT_EQ(cache["entries"][1]["key"]["passes"], "both");
  EXPECT_LE(cache["entries"][1]["measured"]["plan_ms"],
            cache["entries"][1]["measured"]["default_ms"]);
  const CliResult again = moxie("tune " + layer + "--candidates 1");
  EXPECT_NE(again.out.find("plan tuned for both passes first"), std::string::npos) << again.out;
}

TEST_F(CliTune, TunesTheLayersOfAScenario) {
  const CliResult result =
      moxie("tune --scenario " MOXIE_SOURCE_DIR
            "/bench/scenarios/cpu-smoke.json --rounds 3 --modes burst --candidates 1 --cache off "
            "--json -");
  ASSERT_EQ(result.code, 0) << result.err;
  const auto report = nlohmann::json::parse(result.out);
  ASSERT_EQ(report["rows"].size(), 2u);
  EXPECT_EQ(report["rows"][1]["shape"], "tail-tiles");
  EXPECT_TRUE(report["rows"][0]["stored"].is_null());
  EXPECT_TRUE(files().empty());
}

TEST_F(CliTune, WhatIsWrongIsRefusedBeforeAnyWork) {
  expect_error("tune --scenario s.json --hidden 64", 2, {"--scenario", "leave the other"});
  expect_error("tune --scenario s.json --routing uniform", 2, {"--scenario", "leave the other"});
  expect_error("tune --rounds 2", 2, {"--rounds is 2", "at least 3"});
  expect_error("tune --hidden 100", 2, {"--hidden is 100", "nearest legal value 128"});
  expect_error("tune --routing router", 2, {"'router'", "uniform"});
  expect_error("tune --direction sideways", 2, {"'sideways'", "backward"});
  expect_error("tune --devices 0,1", 2, {"--devices", "--backend cuda"});
  expect_error("tune --device h300 " + kLayer, 2, {"'h300'", "h100"});
  expect_error("tune --backend cuda " + kLayer, 1, {"--backend cuda"});
  expect_error("tune --scenario missing.json", 1, {"missing.json", "does not exist"});
  write("c.json", "no cache");
  expect_error("tune " + kLayer + "--cache c.json", 1, {"c.json", "no JSON object"});
  EXPECT_EQ(read("c.json"), "no cache");
}

TEST_F(CliTune, ARecordNeedsAGpu) {
  expect_error("doctor --record r.json", 1, {"CUDA"});
  EXPECT_TRUE(files().empty());
}

TEST_F(CliTune, DoctorListsTheEnvironmentAndTheCache) {
  const CliResult result = moxie("doctor");
  ASSERT_EQ(result.code, 0) << result.err;
  EXPECT_NE(result.out.find("MOXIE_PLAN_CACHE"), std::string::npos);
  EXPECT_NE(result.out.find("plan cache    none"), std::string::npos)  // off in the tests
      << result.out;
}

}  // namespace
}  // namespace moxie::test
