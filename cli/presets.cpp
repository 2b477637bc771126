// `moxie presets`: the published layer shapes that --preset knows.
#include <fmt/format.h>

#include <memory>

#include "cli/errors.h"
#include "cli/json.h"
#include "cli/verbs.h"
#include "moxie/core/problem.h"

namespace moxie::cli {
namespace {

Json preset_json(const Preset& preset) {
  return {
      {"name", preset.name},
      {"hidden", preset.hidden},
      {"intermediate", preset.intermediate},
      {"num_experts", preset.num_experts},
      {"top_k", preset.top_k},
      {"shared",
       {{"intermediate", preset.shared.intermediate}, {"output_gate", preset.shared.output_gate}}},
      {"activation", name(preset.activation.kind)},
      {"expert_bias", preset.expert_bias},
      {"router", preset.sigmoid_router ? "sigmoid" : "softmax"},
      {"note", preset.note}};
}

void print_table() {
  fmt::print("{:<17}{:>6}{:>7}{:>6}{:>4}{:>9}  {:<9}{:<9}{:>8}{}\n", "preset", "H", "I", "E", "K",
             "shared I", "act.", "router", "BF16 GB", "  note");
  for (const Preset& preset : presets()) {
    const double weights =
        3.0 * static_cast<double>(preset.hidden) *
        static_cast<double>(preset.intermediate * preset.num_experts + preset.shared.intermediate);
    const std::string shared =
        preset.shared.intermediate == 0 ? "-" : std::to_string(preset.shared.intermediate);
    const std::string note = preset.note.empty() ? "" : "  " + std::string(preset.note);
    fmt::print("{:<17}{:>6}{:>7}{:>6}{:>4}{:>9}  {:<9}{:<9}{:>8.1f}{}\n", preset.name,
               preset.hidden, preset.intermediate, preset.num_experts, preset.top_k, shared,
               name(preset.activation.kind), preset.sigmoid_router ? "sigmoid" : "softmax",
               weights * 2e-9, note);
  }
  fmt::print(
      "\nBF16 GB: the weights of the layer. On a laptop: moxie run --preset qwen3-30b-a3b "
      "--scale-down 4\n");
}

}  // namespace

Verb add_presets(CLI::App& app) {
  CLI::App* verb =
      app.add_subcommand("presets", "list the published layer shapes that run --preset knows");
  const auto json = std::make_shared<bool>(false);
  verb->add_flag("--json", *json, "print JSON instead of a table");
  return {verb, [json] {
            if (*json) {
              Json list = Json::array();
              for (const Preset& preset : presets()) list.push_back(preset_json(preset));
              fmt::print("{}", to_text(list));
            } else {
              print_table();
            }
            return kExitOk;
          }};
}

}  // namespace moxie::cli
