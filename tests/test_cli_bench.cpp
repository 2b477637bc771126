// `moxie bench layer`: the scenario of the sources runs on the CPU and gives rows that a program
// can read; scenarios and command lines that are wrong are refused with the nearest legal word.
#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "tests/support/cli_runner.h"

namespace moxie::test {
namespace {

const std::string kScenarios = MOXIE_SOURCE_DIR "/bench/scenarios/";

class CliBench : public CliTest {
 protected:
  static nlohmann::json scenario() {
    std::ifstream file(kScenarios + "cpu-smoke.json");
    return nlohmann::json::parse(file);
  }
  // The smoke scenario with one change is refused with these parts in the sentence.
  void expect_refused(const nlohmann::json& changed, const std::vector<std::string>& parts) const {
    write("s.json", changed.dump());
    expect_error("bench layer --scenario s.json", 1, parts);
  }
};

TEST_F(CliBench, TheSmokeScenarioRunsAndItsRowsAreWhole) {
  const CliResult result = moxie("bench layer --scenario " + kScenarios +
                                 "cpu-smoke.json --json r.json --commit abc --slabs 1");
  ASSERT_EQ(result.code, 0) << result.err;
  EXPECT_NE(result.out.find("tail-tiles"), std::string::npos) << result.out;
  const auto json = nlohmann::json::parse(read("r.json"));
  EXPECT_EQ(json["commit"], "abc");
  EXPECT_EQ(json["argv"].size(), 11u);
  EXPECT_EQ(json["scenario"]["seed"], 1);
  EXPECT_TRUE(json["machine"]["cores"].is_number());
  ASSERT_EQ(json["rows"].size(), 2u);
  for (const auto& row : json["rows"]) {
    EXPECT_GT(row["moxie_ms"].get<double>(), 0);
    EXPECT_LE(row["p10"], row["moxie_ms"]);
    EXPECT_LE(row["moxie_ms"], row["p90"]);
    EXPECT_EQ(row["n"], 2);
    EXPECT_EQ(row["ranks"], 2);
    EXPECT_EQ(row["direction"], "forward");
    EXPECT_GT(row["max_rel_l2"].get<double>(), 1e-5);  // BF16, and really compared
    EXPECT_LT(row["max_rel_l2"].get<double>(), 1e-2);
    EXPECT_NE(row["plan"].get<std::string>().find("slabs=1"), std::string::npos) << row["plan"];
    EXPECT_EQ(row["samples"]["moxie burst"].size(), 2u);
    EXPECT_EQ(row["samples"]["moxie sustained"].size(), 2u);
    for (const char* not_measured :
         {"gemm_only_ms", "nccl_torch_ms", "ratio", "sustained_ratio", "nccl_ratio", "zero_copy_ms",
          "schedule_handshake_us", "main_grad_ms", "save_none_ms", "save_z_and_x_ms",
          "sm_clock_mhz", "launches"}) {
      ASSERT_TRUE(row.contains(not_measured)) << not_measured;
      EXPECT_TRUE(row[not_measured].is_null()) << not_measured;
    }
  }
}

TEST_F(CliBench, BackwardIsCheckedAndTimedAlone) {
  const std::string command = "bench layer --scenario " + kScenarios +
                              "cpu-smoke.json --direction backward --modes burst --rounds 1 ";
  const CliResult result = moxie(command + "--json -");
  ASSERT_EQ(result.code, 0) << result.err;
  const auto json = nlohmann::json::parse(result.out);
  ASSERT_EQ(json["rows"].size(), 2u);
  for (const auto& row : json["rows"]) {
    EXPECT_EQ(row["direction"], "backward");
    EXPECT_GT(row["moxie_ms"].get<double>(), 0);
    EXPECT_GT(row["max_rel_l2"].get<double>(), 1e-5);
    EXPECT_LT(row["max_rel_l2"].get<double>(), 1e-2);
    EXPECT_TRUE(row["main_grad_ms"].is_null());  // on GPUs
    EXPECT_GT(row["memory_bytes"]["moxie"].get<double>(), 0);
  }
  // What forward keeps counts.
  const auto less = nlohmann::json::parse(moxie(command + "--save none --json -").out);
  EXPECT_LT(less["rows"][0]["memory_bytes"]["moxie"].get<double>(),
            json["rows"][0]["memory_bytes"]["moxie"].get<double>());
  EXPECT_NE(moxie(command).out.find("backward, 2 ranks"), std::string::npos);
}

TEST_F(CliBench, OptionsOverrideTheScenario) {
  const CliResult result = moxie("bench layer --scenario " + kScenarios +
                                 "cpu-smoke.json --json - --shapes tiny --rounds 1 --modes burst");
  ASSERT_EQ(result.code, 0) << result.err;
  const auto json = nlohmann::json::parse(result.out);
  ASSERT_EQ(json["rows"].size(), 1u);
  EXPECT_EQ(json["rows"][0]["shape"], "tiny");
  EXPECT_EQ(json["rows"][0]["n"], 1);
  EXPECT_FALSE(json["rows"][0]["samples"].contains("moxie sustained"));
}

// A scenario may name several numbers of ranks and routings: a row for each and each shape, but for
// shapes that need more ranks.
TEST_F(CliBench, RanksAndRoutingsAreTakenInTurn) {
  auto json = scenario();
  json["ranks"] = {1, 2};
  json["routing"] = {"uniform", "hot:0"};
  json["shapes"] = {{{"name", "whole"},
                     {"hidden", 128},
                     {"intermediate", 128},
                     {"experts", 4},
                     {"top_k", 2},
                     {"tokens_per_rank", 64}},
                    {{"name", "slice"},
                     {"hidden", 128},
                     {"intermediate", 128},
                     {"experts_per_rank", 1},
                     {"top_k", 2},
                     {"tokens_per_rank", 64},
                     {"min_ranks", 2}}};
  write("s.json", json.dump());
  const std::string command = "bench layer --scenario s.json --rounds 1 --modes burst --json - ";
  const CliResult result = moxie(command);
  ASSERT_EQ(result.code, 0) << result.err;
  std::vector<std::string> rows;
  const auto report = nlohmann::json::parse(result.out);
  for (const auto& row : report["rows"]) {
    rows.push_back(fmt::format("{} {} {} {}", row["shape"].get<std::string>(),
                               row["ranks"].get<int>(), row["problem"]["num_experts"].get<int>(),
                               row["routing"].get<std::string>()));
    EXPECT_LT(row["max_rel_l2"].get<double>(), 1e-2);
    EXPECT_TRUE(row["predicted_ms"].is_null());  // of GPUs
    EXPECT_TRUE(row["link_gbps"].is_null());
  }
  EXPECT_EQ(rows,
            (std::vector<std::string>{"whole 1 4 uniform", "whole 1 4 hot:0", "whole 2 4 uniform",
                                      "slice 2 2 uniform", "whole 2 4 hot:0", "slice 2 2 hot:0"}));
  // Two experts, one on each of two ranks, and two routes per token: each token goes to the other
  // rank once, and one row comes back.
  const double token_gb = 64 * 128 * 2e-9;
  EXPECT_DOUBLE_EQ(report["rows"][3]["link_gb_in"].get<double>(), 2 * token_gb);
  EXPECT_DOUBLE_EQ(report["rows"][3]["link_gb_out"].get<double>(), 2 * token_gb);
  EXPECT_EQ(report["rows"][0]["link_gb_in"], 0);
  // Backward: x as well as dY, unless forward kept it.
  const auto link = [&](const std::string& save) {
    const CliResult backward =
        moxie(command + "--shapes slice --routing uniform --direction backward --save " + save);
    EXPECT_EQ(backward.code, 0) << backward.err;
    return nlohmann::json::parse(backward.out)["rows"][0]["link_gb_in"].get<double>();
  };
  EXPECT_DOUBLE_EQ(link("z"), 3 * token_gb);
  EXPECT_DOUBLE_EQ(link("z+x"), 2 * token_gb);
  expect_error("tune --scenario s.json", 1, {"s.json", "one set of ranks", "4"});
}

// Baselines that cannot be had are told about and leave nulls.
TEST_F(CliBench, WithoutBaselinesTheLayerIsTimedAllTheSame) {
  auto json = scenario();
  json["baselines"] = {"gemm_only", "nccl_torch"};
  write("s.json", json.dump());
  write("broken.py", "import sys\nsys.exit('this one is broken')\n");
  const CliResult result = moxie(
      "bench layer --scenario s.json --shapes tiny --rounds 1 --modes burst --baselines broken.py "
      "--json r.json");
  ASSERT_EQ(result.code, 0) << result.err;
  EXPECT_NE(result.out.find("nccl_torch was not measured"), std::string::npos) << result.out;
  const auto report = nlohmann::json::parse(read("r.json"));
  EXPECT_EQ(report["notes"].size(), 2u);
  EXPECT_TRUE(report["rows"][0]["gemm_only_ms"].is_null());
}

// The protocol, with a worker that answers like bench/baselines.py without needing a GPU.
TEST_F(CliBench, BaselinesAreTimedInTurns) {
  auto json = scenario();
  json["baselines"] = {"gemm_only", "nccl_torch"};
  write("s.json", json.dump());
  write("worker.py", R"(
import json, sys
print(json.dumps({"torch": "9.9", "nccl": "2.99.1"}), flush=True)
for line in sys.stdin:
    command = json.loads(line)
    if command["cmd"] == "setup":
        assert len(command["expert_ids"]) == 2 and sum(command["rows_per_expert"]) > 0
        assert command["direction"] == "forward"
        answer = {"error": "no room for this one"} if sys.argv[1] == "nccl_torch" and command["hidden"] == 192 else {"memory_bytes": 5}
    else:
        answer = {"ms": 2.0 if command["mode"] == "burst" else 4.0, "sm_clock_mhz": 1500.0}
    print(json.dumps(answer), flush=True)
)");
  const CliResult result =
      moxie("bench layer --scenario s.json --baselines worker.py --json r.json");
  if (std::system("python3 -c '' 2>/dev/null") != 0) GTEST_SKIP() << "no python3 here";
  ASSERT_EQ(result.code, 0) << result.err;
  const auto report = nlohmann::json::parse(read("r.json"));
  EXPECT_EQ(report["machine"]["nccl"], "2.99.1");
  const auto& row = report["rows"][0];
  EXPECT_EQ(row["gemm_only_ms"], 2.0);
  EXPECT_EQ(row["nccl_torch_ms"], 2.0);
  EXPECT_DOUBLE_EQ(row["ratio"].get<double>(), row["moxie_ms"].get<double>() / 2);
  EXPECT_DOUBLE_EQ(row["nccl_ratio"].get<double>(), 2 / row["moxie_ms"].get<double>());
  EXPECT_EQ(row["samples"]["gemm_only sustained"][0], nlohmann::json::array({4.0, 1500.0}));
  EXPECT_EQ(row["memory_bytes"]["nccl_torch"], 5);
  EXPECT_FALSE(report["rows"][1]["memory_bytes"].contains("nccl_torch"));
  EXPECT_EQ(report["rows"][1]["gemm_only_ms"], 2.0);
  EXPECT_TRUE(report["rows"][1]["nccl_torch_ms"].is_null());
  ASSERT_EQ(report["notes"].size(), 1u);
  EXPECT_NE(report["notes"][0].get<std::string>().find("no room"), std::string::npos);
}

TEST_F(CliBench, WrongScenariosAreRefused) {
  const auto with = [](const char* key, const nlohmann::json& value) {
    auto json = scenario();
    json[key] = value;
    return json;
  };
  const auto with_shape = [](const char* key, const nlohmann::json& value) {
    auto json = scenario();
    json["shapes"][1][key] = value;
    return json;
  };
  expect_refused(with("roundz", 3), {"s.json", "'roundz'", "did you mean 'rounds'"});
  expect_refused(with("rounds", 0), {"'rounds' is 0", "at least 1"});
  expect_refused(with("rounds", "many"), {"'rounds'", "many"});
  expect_refused(with("modes", {"brust"}), {"'modes' is 'brust'", "did you mean 'burst'"});
  expect_refused(with("modes", nlohmann::json::array()), {"'modes' is empty"});
  expect_refused(with("backend", "gpu"), {"'backend' is 'gpu'", "cpu, cuda"});
  expect_refused(with("baselines", {"nccl"}), {"'baselines' is 'nccl'", "nccl_torch"});
  expect_refused(with("routing", "router"), {"'routing' is 'router'", "uniform"});
  expect_refused(with("routing", "zip"), {"zip", "zipf"});
  expect_refused(with("devices", {0, 1, 2}), {"'ranks' is 2", "3 ranks"});
  expect_refused(with("devices", {{0, 1}, {0, 1, 2}}), {"'ranks' is 2;", "2, 3 ranks"});
  expect_refused(with("devices", nlohmann::json::parse("[[0, 1], []]")), {"'devices' has []"});
  expect_refused(with("ranks", nlohmann::json::array()), {"'ranks' is empty"});
  expect_refused(with("ranks", {1, 0}), {"'ranks' is 0", "at least 1"});
  expect_refused(with("routing", nlohmann::json::array()), {"'routing' is empty"});
  expect_refused(with("routing", {"uniform", "zip"}), {"zip", "zipf"});
  expect_refused(with_shape("experts", 8), {"shape 1", "'experts'", "'experts_per_rank'"});
  expect_refused(with_shape("min_ranks", 3), {"'min_ranks'", "'tail-tiles' is 3", "2"});
  expect_refused(with("plan", {{"slab", 2}}), {"plan", "'slab'", "did you mean 'slabs'"});
  expect_refused(with("plan", {{"x_ring", "big"}}), {"plan", "--x-ring is 'big'"});
  expect_refused(with("shapes", 3), {"'shapes' is 3", "not a list"});
  expect_refused(with_shape("hiden", 64), {"shape 1", "'hiden'", "did you mean 'hidden'"});
  expect_refused(with_shape("top_k", -1), {"shape 1", "'top_k' is -1", "at least 1"});
  expect_refused(with_shape("hidden", 100), {"'tail-tiles'", "hidden is 100", "128"});
  expect_refused(with_shape("top_k", 7), {"'tail-tiles'", "top_k is 7", "6"});
  auto missing = scenario();
  missing.erase("seed");
  missing.erase("rounds");
  expect_refused(missing, {"'rounds' is missing"});
  write("s.json", "{");
  expect_error("bench layer --scenario s.json", 1, {"s.json is not JSON"});
  expect_error("bench layer --scenario none.json", 1, {"none.json does not exist"});
}

TEST_F(CliBench, WrongCommandLinesAreRefused) {
  const std::string smoke = "bench layer --scenario " + kScenarios + "cpu-smoke.json ";
  expect_error("bench", 2, {"layer"});
  expect_error("bench lyer", 2, {"'lyer'", "did you mean 'layer'"});
  expect_error("bench layer", 2, {"--scenario"});
  expect_error(smoke + "--shapes tiny,small", 2, {"--shapes is 'small'", "tiny, tail-tiles"});
  expect_error(smoke + "--modes bust", 2, {"--modes is 'bust'", "did you mean 'burst'"});
  expect_error(smoke + "--rounds 0", 2, {"--rounds is 0", "at least 1"});
  expect_error(smoke + "--slabs 0", 2, {"--slabs is 0", "nearest legal value 1"});
  expect_error(smoke + "--devices 0,1", 2, {"--devices", "cpu"});
  expect_error(smoke + "--routing router", 2, {"'router'", "uniform"});
  expect_error(smoke + "--direction up", 2, {"--direction is 'up'", "forward, backward"});
  expect_error(smoke + "--round 3", 2, {"no option --round", "--rounds"});
  EXPECT_TRUE(files().empty());
}

}  // namespace
}  // namespace moxie::test
