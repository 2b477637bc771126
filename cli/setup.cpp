// From options to a Problem: preset or default shape, then overrides, then scaling, then the
// library's own check.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <utility>

#include "cli/errors.h"
#include "cli/run_options.h"

namespace moxie::cli {
namespace {

constexpr std::int64_t kDefaultRanks = 4, kDefaultTokens = 256, kDefaultRepeat = 3;

// Small enough for two cores and a few seconds, forward, backward and check.
Problem default_shape() {
  Problem problem;
  problem.hidden = 512;
  problem.intermediate = 512;
  problem.num_experts = 16;
  problem.top_k = 4;
  problem.shared.intermediate = 256;
  return problem;
}

void apply_overrides(const RunOptions& options, Problem& problem) {
  const auto set = [](std::int64_t& field, std::int64_t value) {
    if (value != kNotGiven) field = value;
  };
  set(problem.hidden, options.hidden);
  set(problem.intermediate, options.intermediate);
  set(problem.num_experts, options.experts);
  set(problem.top_k, options.top_k);
  set(problem.shared.intermediate, options.shared_intermediate);
  if (options.shared_output_gate) problem.shared.output_gate = true;
  if (options.shared_intermediate == 0 && !options.shared_output_gate)
    problem.shared.output_gate = false;
  if (options.bias) problem.expert_bias = true;
  if (options.activation) problem.activation.kind = *options.activation;
  if (options.limit) problem.activation.limit = static_cast<float>(*options.limit);
  if (options.alpha) problem.activation.alpha = static_cast<float>(*options.alpha);
  if (options.dtype) problem.dtype = *options.dtype;
}

void scale_down(std::int64_t divisor, Problem& problem) {
  const auto width = [divisor](std::int64_t value) {
    return std::max<std::int64_t>(64, align_up(value / divisor, 64));
  };
  problem.hidden = width(problem.hidden);
  problem.intermediate = width(problem.intermediate);
  if (problem.shared.intermediate > 0)
    problem.shared.intermediate = width(problem.shared.intermediate);
  // Enough experts that routing still is a choice, never more than the layer has.
  const std::int64_t fewest = std::max(2 * problem.top_k, problem.num_ranks);
  problem.num_experts =
      std::min(problem.num_experts, std::max(problem.num_experts / divisor, fewest));
}

std::vector<std::int64_t> tokens_per_rank(const RunOptions& options, std::int64_t& num_ranks) {
  if (options.ranks == kNotGiven) {
    if (options.tokens.size() > 1)
      num_ranks = static_cast<std::int64_t>(options.tokens.size());
    else if (!options.cuda.devices.empty())
      num_ranks = static_cast<std::int64_t>(options.cuda.devices.size());
  }
  const auto R = static_cast<std::size_t>(num_ranks);
  if (options.tokens.empty()) return std::vector<std::int64_t>(R, kDefaultTokens);
  if (options.tokens.size() == 1) return std::vector<std::int64_t>(R, options.tokens[0]);
  if (options.tokens.size() != R) {
    throw Usage(
        fmt::format("--tokens names {} ranks; --ranks is {}, and both must be the same (or "
                    "--tokens one number)",
                    options.tokens.size(), num_ranks));
  }
  return options.tokens;
}

}  // namespace

void check_consistency(const RunOptions& options) {
  if (options.backward && options.forward_only)
    throw Usage("--backward and --forward-only exclude each other; give one");
  const CudaOptions& cuda = options.cuda;
  if (options.backend != BackendKind::cuda &&
      (!cuda.devices.empty() || cuda.reserve_sms != 0 || cuda.cluster_size != 0)) {
    throw Usage(
        "--devices, --reserve-sms and --cluster-size are for GPUs; add --backend cuda, or leave "
        "them out");
  }
  if (options.inputs.empty()) return;
  const std::array<std::pair<const char*, bool>, 17> fixed = {{
      {"--preset", !options.preset.empty()},
      {"--scale-down", options.scale_down != 1},
      {"--ranks", options.ranks != kNotGiven},
      {"--tokens", !options.tokens.empty()},
      {"--hidden", options.hidden != kNotGiven},
      {"--intermediate", options.intermediate != kNotGiven},
      {"--experts", options.experts != kNotGiven},
      {"--top-k", options.top_k != kNotGiven},
      {"--shared-intermediate", options.shared_intermediate != kNotGiven},
      {"--shared-output-gate", options.shared_output_gate},
      {"--bias", options.bias},
      {"--activation", options.activation.has_value()},
      {"--limit", options.limit.has_value()},
      {"--alpha", options.alpha.has_value()},
      {"--dtype", options.dtype.has_value()},
      {"--text", !options.text.empty()},
      {"--routing", options.routing.has_value()},
  }};
  for (const auto& [name, given] : fixed) {
    if (given)
      throw Usage(fmt::format("--inputs {} already says what {} is; leave one of the two out",
                              options.inputs, name));
  }
}

Setup make_setup(const RunOptions& options) {
  Setup setup;
  setup.types = {.ids = options.ids, .matrix_grads = options.grads};
  setup.backend = options.backend;
  setup.backward = !options.forward_only;
  setup.repeat = options.repeat == kNotGiven ? kDefaultRepeat : options.repeat;
  std::int64_t num_ranks = options.ranks == kNotGiven ? kDefaultRanks : options.ranks;
  setup.tokens = tokens_per_rank(options, num_ranks);

  Problem& problem = setup.problem;
  problem = options.preset.empty() ? default_shape() : problem_of(find_preset(options.preset));
  problem.num_ranks = num_ranks;
  problem.max_tokens =
      std::max<std::int64_t>(1, *std::max_element(setup.tokens.begin(), setup.tokens.end()));
  if (options.scale_down > 1) scale_down(options.scale_down, problem);
  apply_overrides(options, problem);
  check(problem);
  if (problem.top_k > problem.num_experts &&
      (!options.routing || options.routing->kind != RoutingKind::file)) {
    throw Usage(fmt::format(
        "--top-k is {}; it must be at most the number of experts, {}, the nearest legal value",
        problem.top_k, problem.num_experts));
  }
  Problem untouched = default_shape();
  untouched.num_ranks = problem.num_ranks;
  untouched.max_tokens = problem.max_tokens;
  setup.shape_name = !options.preset.empty() ? options.preset
                     : problem == untouched  ? "default shape"
                                             : "own shape";
  if (options.scale_down > 1)
    setup.shape_name += fmt::format(" scaled down by {}", options.scale_down);

  const bool sigmoid = !options.preset.empty() && find_preset(options.preset).sigmoid_router;
  setup.router = options.router.value_or(sigmoid ? RouterKind::sigmoid : RouterKind::softmax);
  setup.routing = options.routing.value_or(Routing{});
  return setup;
}

std::string in_option_words(std::string sentence) {
  constexpr std::array<std::pair<std::string_view, std::string_view>, 35> kWords = {{
      {"plan.dispatch", "--dispatch"},
      {"plan.combine", "--combine"},
      {"plan.num_slabs", "--slabs"},
      {"plan.band_blocks", "--band"},
      {"plan.lag_bands", "--lag"},
      {"plan.minibatch_blocks", "--minibatch"},
      {"plan.capacity_rows", "--capacity-rows"},
      {"plan.x_ring_blocks", "--x-ring"},
      {"plan.hidden_ring_blocks", "--hidden-ring"},
      {"plan.chunk_blocks", "--chunk"},
      {"plan.lag_chunks", "--lag-chunks"},
      {"plan.backward_ring_blocks", "--backward-ring"},
      {"plan.saved_rows", "--saved-rows"},
      {"plan.comm_workers", "--comm-workers"},
      {"plan.compute_workers", "--compute-workers"},
      {"cuda.devices", "--devices"},
      {"cuda.reserve_sms", "--reserve-sms"},
      {"cuda.cluster_size", "--cluster-size"},
      {"World::cuda", "--backend cuda"},
      {"World::cpu", "--backend cpu"},
      {"num_ranks", "--ranks"},
      {"max_tokens", "--tokens"},
      {"shared.intermediate", "--shared-intermediate"},
      {"shared.output_gate", "--shared-output-gate"},
      {"activation.limit", "--limit"},
      {"num_experts", "--experts"},
      {"intermediate", "--intermediate"},
      {"hidden", "--hidden"},
      {"top_k", "--top-k"},
      {"lag_bands", "--lag"},
      {"band_blocks", "--band"},
      {"minibatch_blocks", "--minibatch"},
      {"chunk_blocks", "--chunk"},
      {"lag_chunks", "--lag-chunks"},
      {"preset '", "--preset '"},
  }};
  const auto is_word = [](char c) {
    return std::isalnum(static_cast<unsigned char>(c)) || c == '_' || c == '.' || c == '-';
  };
  for (std::size_t at = 0; at < sentence.size(); ++at) {
    if (at > 0 && is_word(sentence[at - 1])) continue;
    for (const auto& [field, option] : kWords) {
      const std::size_t end = at + field.size();
      if (sentence.compare(at, field.size(), field) != 0) continue;
      if (end < sentence.size() && is_word(sentence[end]) && field.back() != '\'') continue;
      sentence.replace(at, field.size(), option);
      at += option.size() - 1;
      break;
    }
  }
  return sentence;
}

}  // namespace moxie::cli
