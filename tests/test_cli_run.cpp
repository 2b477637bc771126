// Whole runs through the program: results that are checked, the same for any number of ranks and
// after a round trip through files; reports and timelines that other programs can read; faults that
// are reported.
#include <chrono>
#include <cmath>
#include <cstring>
#include <nlohmann/json.hpp>

#include "moxie/pipeline/layout.h"
#include "tests/support/cli_runner.h"

namespace moxie::test {
namespace {

class CliRun : public CliTest {
 protected:
  nlohmann::json report(const std::string& arguments) const {
    const CliResult result = moxie("run " + arguments + " --json -");
    EXPECT_EQ(result.code, 0) << arguments << "\n" << result.err;
    return result.code == 0 ? nlohmann::json::parse(result.out) : nlohmann::json();
  }
  // .npy data without the header.
  std::string data(const std::string& name) const {
    const std::string text = read(name);
    const auto at = [&](std::size_t i) {
      return static_cast<std::size_t>(static_cast<unsigned char>(text.at(i)));
    };
    return text.substr(10 + at(8) + 256 * at(9));
  }
};

TEST_F(CliRun, EveryKindOfLayerPassesItsCheck) {
  for (const char* layer :
       {"--ranks 4 --tokens 40", "--ranks 3 --tokens 17,0,9 --dtype f32",
        "--ranks 1 --tokens 30 --top-k 6", "--ranks 8 --tokens 5 --top-k 1 --shared-intermediate 0",
        "--ranks 2 --tokens 33 --shared-output-gate --dtype f32",
        "--ranks 2 --tokens 33 --activation gpt_oss --bias --limit 0.5",
        "--ranks 2 --tokens 64 --activation swiglu_clamped --limit 0.7", "--ranks 4 --tokens 0",
        "--ranks 2 --tokens 300 --routing hot:3",
        "--ranks 3 --tokens 50 --routing zipf:1.2 --ids i64",
        "--ranks 2 --tokens 40 --hidden 192 --intermediate 320 --grads bf16"}) {
    SCOPED_TRACE(layer);
    const auto json = report(kSmall + layer + " --check");
    if (json.is_null()) continue;
    EXPECT_EQ(json["check"]["ok"], true) << json["check"].dump(1);
    EXPECT_EQ(json["same_bits"]["ok"], true);
    EXPECT_EQ(json["same_bits"]["plans"].size(), 2u);
    EXPECT_EQ(json["check"]["tokens_checked"], json["check"]["tokens"]);
  }
}

// Heap and workspace, whose buffers for forward and backward share addresses.
TEST_F(CliRun, MemoryIsWhatWasAllocated) {
  const Problem p{.num_ranks = 2,
                  .max_tokens = 40,
                  .hidden = 192,
                  .intermediate = 128,
                  .num_experts = 6,
                  .top_k = 2};
  const auto json = report(
      "--ranks 2 --tokens 40 --hidden 192 --intermediate 128 --experts 6 --top-k 2 "
      "--shared-intermediate 0 --repeat 1");
  const Plan plan = pipeline::resolve(p, pipeline::default_plan(p));
  EXPECT_EQ(json["memory_bytes_per_rank"],
            pipeline::heap_layout(p).num_bytes + pipeline::workspace_layout(p, plan).num_bytes);
}

TEST_F(CliRun, PlanOptionsReachThePlan) {
  const auto plan = report(
      kSmall +
      "--ranks 2 --tokens 600 --order lag --lag 3 --band 2 --minibatch 2 --x-ring 5 --hidden-ring "
      "9 --chunk 2 "
      "--lag-chunks 2 --backward-ring 8 --save none --comm-workers 2 --compute-workers 3 --slabs 1 "
      "--dispatch push --combine comm_workers")["plan"];
  EXPECT_EQ(plan["order"], "lag");
  EXPECT_EQ(plan["dispatch"], "push");
  EXPECT_EQ(plan["combine"], "comm_workers");
  EXPECT_EQ(plan["lag_bands"], 3);
  EXPECT_EQ(plan["band_blocks"], 2);
  EXPECT_EQ(plan["minibatch_blocks"], 2);
  EXPECT_EQ(plan["x_ring_blocks"], 5);
  EXPECT_EQ(plan["hidden_ring_blocks"], 9);
  EXPECT_EQ(plan["chunk_blocks"], 2);
  EXPECT_EQ(plan["lag_chunks"], 2);
  EXPECT_EQ(plan["backward_ring_blocks"], 8);
  EXPECT_EQ(plan["save"], "none");
  EXPECT_EQ(plan["comm_workers"], 2);
  EXPECT_EQ(plan["compute_workers"], 3);
  const auto defaults = report(kSmall + "--tokens 8 --mode split --save z+x")["plan"];
  EXPECT_EQ(defaults["save"], "z+x");
  EXPECT_EQ(defaults["dispatch"], "pull");
  EXPECT_EQ(defaults["combine"], "epilogue");
  EXPECT_EQ(defaults["comm_workers"], 0);
}

TEST_F(CliRun, ADumpFedBackGivesTheSameBits) {
  ASSERT_EQ(
      moxie("run " + kSmall + "--ranks 3 --tokens 20,0,7 --bias --shared-output-gate --dump a")
          .code,
      0);
  const CliResult again = moxie("run --inputs a --mode split --repeat 1 --dump b");
  ASSERT_EQ(again.code, 0) << again.err;
  std::size_t compared = 0;
  for (const std::string& name : files()) {
    if (!name.starts_with("a/") || !name.ends_with(".npy")) continue;
    EXPECT_EQ(read(name), read("b" + name.substr(1))) << name;
    ++compared;
  }
  EXPECT_EQ(compared, 3u * 27);  // docs/dump-format.md: 14 inputs, 13 results
  for (const std::string& name : files()) EXPECT_EQ(name.find(".tmp"), std::string::npos) << name;
}

TEST_F(CliRun, ForwardDoesNotDependOnTheNumberOfRanks) {
  const std::string layer = "run " + kSmall + "--forward-only ";
  ASSERT_EQ(moxie(layer + "--ranks 1 --tokens 24 --dump one").code, 0);
  ASSERT_EQ(moxie(layer + "--ranks 4 --tokens 11,0,6,7 --dump four").code, 0);
  std::string joined;
  for (const char* rank : {"0", "1", "2", "3"})
    joined += data(std::string("four/rank") + rank + "/y.bf16.npy");
  EXPECT_EQ(data("one/rank0/y.bf16.npy"), joined);
}

TEST_F(CliRun, TheTextDecidesTheRouting) {
  write("skewed.txt", std::string(64, 'e'));
  const auto skewed = report(kSmall + "--ranks 2 --tokens 32 --forward-only --text skewed.txt");
  write("varied.txt", "Pack my box with five dozen liquor jugs; the quick brown fox jumps over");
  const auto varied = report(kSmall + "--ranks 2 --tokens 32 --forward-only --text varied.txt");
  EXPECT_NE(skewed["rows"], varied["rows"]);
  EXPECT_NE(skewed["input"].get<std::string>().find("skewed.txt"), std::string::npos);
  EXPECT_NE(
      report(kSmall + "--tokens 9 --router sigmoid")["input"].get<std::string>().find("sigmoid"),
      std::string::npos);
}

TEST_F(CliRun, ReportAndTimeline) {
  const CliResult result =
      moxie("run " + kSmall + "--ranks 2 --tokens 50 --repeat 5 --trace t --json r.json");
  ASSERT_EQ(result.code, 0) << result.err;
  for (const char* word :
       {"layer", "rows", "forward", "backward", "dispatch", "wgrad", "t.svg", "r.json"}) {
    EXPECT_NE(result.out.find(word), std::string::npos) << word;
  }
  const auto json = nlohmann::json::parse(read("r.json"));
  EXPECT_EQ(json["forward"]["samples_ms"].size(), 5u);
  EXPECT_GT(json["backward"]["gflop_per_s"].get<double>(), 0);
  EXPECT_TRUE(json["check"].is_null());  // not asked for, not measured
  EXPECT_GT(json["stages_ms"]["forward"]["FC1"].get<double>(), 0);
  const auto timeline = nlohmann::json::parse(read("t.json"));
  EXPECT_EQ(timeline["moxie"]["passes"].size(), 2u);
  const CliResult drawn = moxie("trace t.json --svg again.svg");
  EXPECT_EQ(drawn.code, 0) << drawn.err;
  const auto lanes = [](const std::string& svg) { return svg.substr(svg.find("class=\"panel\"")); };
  EXPECT_EQ(lanes(read("again.svg")), lanes(read("t.svg")));  // only the heading differs
}

TEST_F(CliRun, OverfullCapacityIsRefusedBeforeDataMoves) {
  expect_error("run " + kSmall + "--ranks 2 --tokens 300 --routing hot:0 --capacity-rows 128", 1,
               {"128"});
}

TEST_F(CliRun, NonFiniteInputsAreFoundWhenAskedFor) {
  ASSERT_EQ(moxie("run " + kSmall + "--ranks 2 --tokens 6 --dtype f32 --dump d").code, 0);
  std::string x = read("d/rank1/x.npy");
  const float nan = std::nanf("");
  std::memcpy(x.data() + x.size() - 4, &nan, 4);
  write("d/rank1/x.npy", x);
  EXPECT_EQ(moxie("run --inputs d --repeat 1").code, 0);  // stays in the token that has it
  expect_error("run --inputs d --repeat 1 --validate", 1, {"x", "rank 1"});
}

TEST_F(CliRun, ALostPeerIsReportedInTime) {
  const auto begin = std::chrono::steady_clock::now();
  const CliResult result =
      moxie("run " + kSmall + "--ranks 3 --tokens 40 --kill-rank 1 --timeout 1 --dump d --trace t");
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(30));
  EXPECT_EQ(result.code, 1);
  EXPECT_TRUE(result.err.starts_with("moxie: ")) << result.err;
  EXPECT_NE(result.err.find("waited for"), std::string::npos) << result.err;
  EXPECT_TRUE(files().empty());
}

TEST_F(CliRun, WithoutCudaOneSentenceSaysHowToGetIt) {
  const CliResult result = moxie("run --backend cuda " + kSmall + "--tokens 8");
  if (result.code == 0) GTEST_SKIP() << "a GPU is here; tests/gpu judges it";
  EXPECT_EQ(result.code, 1);
  EXPECT_EQ(std::count(result.err.begin(), result.err.end(), '\n'), 1) << result.err;
  EXPECT_TRUE(result.err.starts_with("moxie: --backend cuda ")) << result.err;
  EXPECT_NE(result.err.find("--backend cpu"), std::string::npos) << result.err;
  EXPECT_TRUE(files().empty());
}

TEST_F(CliRun, PresetsAndDoctor) {
  const auto presets = nlohmann::json::parse(moxie("presets --json").out);
  EXPECT_GE(presets.size(), 12u);
  EXPECT_NE(moxie("presets").out.find("kimi-k2.5"), std::string::npos);
  for (const auto& preset : presets) {
    const std::string name = preset["name"];
    const auto json =
        report("--preset " + name + " --scale-down 64 --ranks 2 --tokens 8 --repeat 1 --check");
    if (!json.is_null()) EXPECT_EQ(json["check"]["ok"], true) << name << json["check"].dump(1);
  }
  const CliResult doctor = moxie("doctor");
  EXPECT_EQ(doctor.code, 0) << doctor.err;
  for (const char* word : {"cores", "GEMM", "CUDA", "environment"})
    EXPECT_NE(doctor.out.find(word), std::string::npos) << word;
  const auto json = nlohmann::json::parse(moxie("doctor --json").out);
  EXPECT_TRUE(json["findings"].is_array());
  for (const auto& finding : json["findings"])  // what is missing says what it disables
    EXPECT_EQ(finding["ok"].get<bool>(), finding["consequence"] == "") << finding;
  EXPECT_EQ(json["cuda"]["nccl_needed"], "2.28.0");
  EXPECT_TRUE(json["cuda"]["gpus"].is_array());
  const bool built = json["cuda"]["built_with_cuda"];
  EXPECT_EQ(doctor.out.find("built without CUDA") == std::string::npos, built) << doctor.out;
}

}  // namespace
}  // namespace moxie::test
