// Weights depend on the seed and the global expert only, tokens on their number among all tokens:
// the same layer computes on the same data for every number of ranks.
#include "cli/inputs.h"

#include <fmt/format.h>
#include <unistd.h>

#include <cmath>
#include <numeric>

#include "cli/dump.h"
#include "cli/errors.h"
#include "cli/random.h"
#include "cli/text.h"

namespace moxie::cli {
namespace {

template <class T>
void fill_part(HostTensor& tensor, const char* name, std::uint64_t seed, std::int64_t stream,
               std::int64_t part, std::int64_t num_parts, double scale) {
  const std::span<T> all = tensor.as<T>();
  const std::size_t size = all.size() / static_cast<std::size_t>(num_parts);
  Random(seed, name, stream)
      .fill(all.subspan(static_cast<std::size_t>(part) * size, size), static_cast<float>(scale));
}

// Part `part` of `num_parts` along the first dimension, from its own stream of random numbers.
void fill(HostTensor& tensor, const char* name, std::uint64_t seed, std::int64_t stream,
          std::int64_t part, std::int64_t num_parts, double scale) {
  if (tensor.absent() || num_parts == 0) return;
  tensor.dtype == DType::f32 ? fill_part<float>(tensor, name, seed, stream, part, num_parts, scale)
                             : fill_part<bf16>(tensor, name, seed, stream, part, num_parts, scale);
}

void fill_weights(const Problem& p, std::uint64_t seed, std::int64_t rank_idx, RankTensors& rank) {
  const double by_hidden = 1 / std::sqrt(static_cast<double>(p.hidden));
  const double by_width = 1 / std::sqrt(static_cast<double>(p.intermediate));
  const std::int64_t begin = expert_begin(p.num_experts, p.num_ranks, RankId{rank_idx});
  const std::int64_t count = num_local_experts(p.num_experts, p.num_ranks, RankId{rank_idx});
  for (std::int64_t local = 0; local < count; ++local) {
    fill(rank.gate, "gate", seed, begin + local, local, count, by_hidden);
    fill(rank.up, "up", seed, begin + local, local, count, by_hidden);
    fill(rank.down, "down", seed, begin + local, local, count, by_width);
    fill(rank.gate_bias, "gate_bias", seed, begin + local, local, count, 0.2);
    fill(rank.up_bias, "up_bias", seed, begin + local, local, count, 0.2);
    fill(rank.down_bias, "down_bias", seed, begin + local, local, count, 0.2);
  }
  if (p.shared.intermediate == 0) return;
  fill(rank.shared_gate, "shared_gate", seed, 0, 0, 1, by_hidden);
  fill(rank.shared_up, "shared_up", seed, 0, 0, 1, by_hidden);
  fill(rank.shared_down, "shared_down", seed, 0, 0, 1,
       1 / std::sqrt(static_cast<double>(p.shared.intermediate)));
  fill(rank.shared_output_gate, "shared_output_gate", seed, 0, 0, 1, by_hidden);
}

// A double: shapes that nobody could allocate must not overflow.
double tensor_bytes(const Setup& setup) {
  double total = 0;
  for (std::size_t rank = 0; rank < setup.tokens.size(); ++rank) {
    const auto add = [&](const char* name) {
      const TensorSpec spec = tensor_spec(
          setup.problem, setup.types, static_cast<std::int64_t>(rank), setup.tokens[rank], name);
      double bytes = spec.shape.rank > 0 ? static_cast<double>(size_bytes(spec.dtype)) : 0;
      for (std::int32_t i = 0; i < spec.shape.rank; ++i)
        bytes *= static_cast<double>(spec.shape.dim[static_cast<std::size_t>(i)]);
      total += bytes;
    };
    for (const InputName& input : input_names()) add(input.name);
    for (const ResultName& result : result_names()) {
      if (!result.backward || setup.backward) add(result.name);
    }
  }
  return total;
}

double gigabytes(double bytes) { return bytes * 1e-9; }

}  // namespace

Inputs make_inputs(const RunOptions& options, const Setup& setup, Progress& progress) {
  Inputs inputs;
  if (!options.inputs.empty()) {
    inputs.ranks = read_dump_inputs(options.inputs, setup);
    inputs.origin = fmt::format("folder {}", options.inputs);
    return inputs;
  }
  const Problem& problem = setup.problem;
  const std::int64_t num_tokens =
      std::accumulate(setup.tokens.begin(), setup.tokens.end(), std::int64_t{0});
  const bool from_text = !options.text.empty() || setup.routing.kind == RoutingKind::router;
  Text text;
  if (from_text) text = options.text.empty() ? default_text() : load_text(options.text);
  for (std::int64_t rank = 0; rank < problem.num_ranks; ++rank) {
    progress.show("weights", static_cast<double>(rank) / static_cast<double>(problem.num_ranks));
    inputs.ranks.push_back(
        allocate_inputs(problem, setup.types, rank, setup.tokens[static_cast<std::size_t>(rank)]));
    fill_weights(problem, options.seed, rank, inputs.ranks.back());
  }
  std::int64_t first_token = 0;
  for (std::size_t rank = 0; rank < inputs.ranks.size(); ++rank) {
    for (std::int64_t token = 0; token < setup.tokens[rank]; ++token) {
      const std::int64_t stream = first_token + token;
      if (!from_text)
        fill(inputs.ranks[rank].x, "x", options.seed, stream, token, setup.tokens[rank], 1);
      fill(inputs.ranks[rank].dy, "dy", options.seed, stream, token, setup.tokens[rank], 1);
    }
    first_token += setup.tokens[rank];
  }
  inputs.origin = "random x";
  if (from_text) {
    embed_text(text, problem, options.seed, inputs.ranks);
    const auto size = static_cast<std::int64_t>(text.bytes.size());
    inputs.origin = num_tokens <= size
                        ? fmt::format("the first {} bytes of {}", num_tokens, text.name)
                        : fmt::format("the {} bytes of {}, repeated", size, text.name);
  }
  progress.show("routes", 0.5);
  make_routes(problem, setup.routing, setup.router, options.seed, inputs.ranks);
  return inputs;
}

void check_memory(const RunOptions& options, const Setup& setup) {
  const double have =
      static_cast<double>(::sysconf(_SC_PHYS_PAGES)) * static_cast<double>(::sysconf(_SC_PAGESIZE));
  const double needed = tensor_bytes(setup);
  if (have <= 0 || needed < 0.8 * have) return;
  const std::string sentence = fmt::format(
      "{} needs {:.1f} GB for weights, gradients and activations and this machine has {:.1f} GB",
      setup.shape_name, gigabytes(needed), gigabytes(have));
  if (!options.inputs.empty()) throw Failure(sentence + "; a smaller dump is needed");
  RunOptions smaller = options;
  for (std::int64_t divisor = 2; divisor <= 1024; divisor *= 2) {
    smaller.scale_down = options.scale_down * divisor;
    if (tensor_bytes(make_setup(smaller)) < 0.4 * have) {
      throw Usage(fmt::format("{}; give --scale-down {}", sentence, smaller.scale_down));
    }
  }
  throw Usage(sentence +
              "; give fewer --tokens or a smaller --experts, --hidden or --intermediate");
}

}  // namespace moxie::cli
