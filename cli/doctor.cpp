// `moxie doctor`: what this machine and this build offer, what is missing, and what each missing
// thing disables. It asks and reports; it changes nothing and exits with 0 unless the CPU backend
// itself does not work.
#include <fmt/format.h>

#include <algorithm>
#include <fstream>
#include <memory>
#include <sstream>
#include <thread>

#include "cli/doctor.h"
#include "cli/errors.h"
#include "cli/options.h"
#include "cli/tensors.h"
#include "cli/verbs.h"
#include "moxie/core/environment.h"
#include "moxie/moxie.h"

namespace moxie::cli {
namespace {

std::string simd_words() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string text; std::getline(file, text);) {
    if (!text.starts_with("flags") && !text.starts_with("Features")) continue;
    const std::string flags = text + " ";
    std::string found;
    for (const char* name :
         {"sse4_2", "avx2", "fma", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "bf16", "sve"}) {
      if (flags.find(fmt::format(" {} ", name)) != std::string::npos)
        found += (found.empty() ? "" : " ") + std::string(name);
    }
    return found.empty() ? "none known" : found;
  }
  return "unknown";
}

// A small layer, forward and backward, over two ranks. Weights are zero, so that the result must be
// exactly zero whatever was in the memory before. Returns what the tiles run on.
std::string self_test() {
  Problem problem;
  problem.num_ranks = 2;
  problem.max_tokens = 4;
  problem.hidden = problem.intermediate = 64;
  problem.num_experts = 3;
  problem.top_k = 2;
  std::vector<RankTensors> inputs;
  std::vector<RankResults> results;
  for (std::int64_t rank = 0; rank < 2; ++rank) {
    inputs.push_back(allocate_inputs(problem, {}, rank, 4));
    results.push_back(allocate_results(problem, {}, rank, 4, true));
    std::fill(results.back().y.bytes.begin(), results.back().y.bytes.end(), std::byte{0xff});
  }
  World world = World::cpu({.num_ranks = 2, .timeout_s = 20});
  Layer layer(world, problem);
  const Context context = layer.forward(forward_inputs(inputs), forward_outputs(results));
  layer.backward(context, backward_inputs(inputs), backward_outputs(results));
  for (const RankResults& rank : results) {
    for (std::int64_t i = 0; i < rank.y.shape.num_elements(); ++i) {
      if (value_at(rank.y, i) != 0)
        throw Error(ErrorCode::unavailable, "a layer of zeros did not give zeros");
    }
  }
  return world.describe_gemm();
}

std::vector<Finding> examine() {
  std::vector<Finding> findings;
  const unsigned cores = std::thread::hardware_concurrency();
  findings.push_back(
      {"cores", cores >= 2, std::to_string(cores),
       cores >= 2 ? "" : "ranks take turns on one core: correct, but nothing overlaps"});
  const std::string simd = simd_words();
  const bool wide =
      simd.find("avx2") != std::string::npos || simd.find("asimd") != std::string::npos;
  findings.push_back({"SIMD", wide, simd, wide ? "" : "matrix products run several times slower"});
  const Json machine = machine_json();
  findings.push_back({"CPU", true, machine.at("cpu").get<std::string>(), ""});
  findings.push_back({"system", true, machine.at("system").get<std::string>(), ""});
  try {
    findings.push_back({"CPU backend", true, "ran a small layer over 2 ranks", ""});
    const std::string gemm = self_test();
    const bool plain = gemm.find("oneDNN") == std::string::npos;
    findings.push_back({"GEMM library", !plain, gemm,
                        plain ? "matrix products run in plain loops: correct, but slow (install "
                                "libdnnl-dev and rebuild)"
                              : ""});
  } catch (const Error& error) {
    findings.back() = {"CPU backend", false, error.what(), "nothing runs"};
  }
  return findings;
}

void print_table(const std::vector<Finding>& findings) {
  fmt::print("Moxie {}\n\n", version());
  for (const Finding& finding : findings) {
    fmt::print("{:<14}{:<9}{}\n", finding.what, finding.good ? "ok" : "missing", finding.found);
    if (!finding.consequence.empty()) fmt::print("{:<23}-> {}\n", "", finding.consequence);
  }
  fmt::print("\nenvironment variables that matter\n");
  for (const EnvironmentVariable& variable : environment_variables()) {
    const char* value = variable.value();
    fmt::print("  {:<22}{:<10}{}\n", variable.name, value == nullptr ? "not set" : value,
               variable.meaning);
  }
  const std::string cache = plan_cache_file();
  fmt::print("\nplan cache    {}\n", cache.empty() ? "none" : cache);
}

Json to_json(const std::vector<Finding>& findings, const Json& gpus) {
  Json list = Json::array(), variables = Json::array();
  for (const Finding& f : findings) {
    list.push_back(
        {{"what", f.what}, {"ok", f.good}, {"found", f.found}, {"consequence", f.consequence}});
  }
  for (const EnvironmentVariable& v : environment_variables()) {
    const char* value = v.value();
    variables.push_back({{"name", v.name},
                         {"value", value == nullptr ? Json() : Json(value)},
                         {"meaning", v.meaning}});
  }
  const std::string cache = plan_cache_file();
  return {{"moxie", version()},
          {"findings", list},
          {"cuda", gpus},
          {"environment", variables},
          {"plan_cache", cache.empty() ? Json() : Json(cache)}};
}

}  // namespace

Verb add_doctor(CLI::App& app) {
  CLI::App* verb =
      app.add_subcommand("doctor", "what this machine and this build can do, and what is missing");
  const auto json = std::make_shared<bool>(false);
  verb->add_flag("--json", *json, "print JSON instead of a table");
  const auto record = std::make_shared<std::string>();
  add_text(*verb, "--record", "FILE",
           "measure a device record on the GPUs of this machine, under a minute",
           [record](const std::string& text) { *record = text; });
  return {verb, [json, record] {
            if (!record->empty()) return record_device(*record);
            std::vector<Finding> findings = examine();
            const GpuMachineInfo gpus = examine_gpus();
            const transport::NcclReport nccl = transport::examine_nccl();
            add_gpu_findings(gpus, nccl, findings);
            *json ? fmt::print("{}", to_text(to_json(findings, gpus_json(gpus, nccl))))
                  : print_table(findings);
            for (const Finding& finding : findings) {
              if (finding.what == "CPU backend" && !finding.good) return kExitFailure;
            }
            return kExitOk;
          }};
}

}  // namespace moxie::cli
