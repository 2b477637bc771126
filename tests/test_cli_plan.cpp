// `moxie plan` and `moxie simulate` as a person uses them: tables, JSON, timelines, and what they
// refuse.
#include <nlohmann/json.hpp>

#include "tests/support/cli_runner.h"

namespace moxie::test {
namespace {

using CliPlan = CliTest;

TEST_F(CliPlan, TableAndJsonSayTheSame) {
  const std::string request =
      "plan --preset moonlight-16b --device h200 --ranks 2 --tokens 256 --direction forward";
  const CliResult table = moxie(request);
  ASSERT_EQ(table.code, 0) << table.err;
  for (const char* word :
       {"layer      moonlight-16b", "machine    h200", "predicted  forward",
        "bounds     forward: GEMM only", "nearest", "memory     bytes of one rank", "heap.returns",
        "why        The forward pass takes", "assumed"}) {
    EXPECT_NE(table.out.find(word), std::string::npos) << word << " is not in\n" << table.out;
  }
  const CliResult json = moxie(request + " --json");
  ASSERT_EQ(json.code, 0) << json.err;
  const auto report = nlohmann::json::parse(json.out);
  EXPECT_EQ(report["alternatives"].size(), 5u);
  EXPECT_GT(report["chosen"]["forward_ms"].get<double>(), 0);
  EXPECT_TRUE(report["chosen"]["backward_ms"].is_null());
  EXPECT_EQ(report["memory_bytes"]["heap.x_in"].get<std::int64_t>(), 256 * 2048 * 2);
  EXPECT_EQ(report["memory_bytes"]["cuda.pulled"].get<std::int64_t>(), 2 * 256 * 8);
}

TEST_F(CliPlan, SimulationLeavesATimelineThatTraceReads) {
  const CliResult run = moxie(
      "simulate --preset moonlight-16b --ranks 2 --tokens 64,32 --direction forward --trace t");
  ASSERT_EQ(run.code, 0) << run.err;
  EXPECT_NE(run.out.find("link       out"), std::string::npos) << run.out;
  EXPECT_EQ(files(), (std::set<std::string>{"t.json", "t.svg"}));
  const CliResult picture = moxie("trace t.json --svg again.svg");
  EXPECT_EQ(picture.code, 0) << picture.err;
  EXPECT_EQ(picture.out, "again.svg: 1 pass, 2 ranks\n");
}

TEST_F(CliPlan, StudiesPrintPublishedSimulatedRatio) {
  const CliResult table = moxie("simulate --study packet-bytes");
  ASSERT_EQ(table.code, 0) << table.err;
  EXPECT_NE(table.out.find("159.600    160.000   1.003"), std::string::npos) << table.out;
  const auto json = nlohmann::json::parse(moxie("simulate --study packet-bytes --json").out);
  EXPECT_NEAR(json["rows"][1]["ratio"].get<double>(), 1.0, 0.01);
}

TEST_F(CliPlan, OwnDeviceRecord) {
  write("mine.json", "{\"name\": \"mine\", \"title\": \"t\", \"constants\": {}}");
  expect_error("plan --preset moonlight-16b --device mine.json", 2,
               {"mine.json: constant 'num_sms'", "is missing"});
  expect_error("plan --preset moonlight-16b --device none.json", 2, {"none.json cannot be read"});
}

TEST_F(CliPlan, BadRequestsAreRefusedWithAWayOut) {
  expect_error("plan", 2, {"--preset is missing", "moxie presets"});
  expect_error("plan --preset mixtral", 2, {"'mixtral-8x7b'"});
  expect_error("plan --preset mixtral-8x7b --device h20", 2, {"device 'h20'", "'h200'"});
  expect_error("plan --preset mixtral-8x7b --ranks 9", 2,
               {"--ranks is 9", "nearest legal value 8"});
  expect_error("plan --preset mixtral-8x7b --tokens 0", 2,
               {"--tokens is 0", "nearest legal value is 1"});
  expect_error("plan --preset mixtral-8x7b --memory 0.01", 2, {"no plan fits into 0.01 GB"});
  expect_error("simulate --preset moonlight-16b --ranks 2 --x-ring 2", 2,
               {"--x-ring is 2", "nearest legal value 8"});
  expect_error("simulate --preset moonlight-16b --ranks 2 --comm-workers 140", 2,
               {"--comm-workers is 140", "nearest legal value 131"});
  expect_error("simulate --preset moonlight-16b --ranks 2 --tokens 4,0,1", 2,
               {"--tokens names 3 ranks; --ranks is 2"});
  expect_error("simulate --study minibach", 2, {"'minibatch'"});
}

}  // namespace
}  // namespace moxie::test
