// The options of `moxie run`, grouped as its help shows them. Plan defaults are those of the
// library.
#include "cli/run_options.h"

#include <array>

#include "cli/options.h"

namespace moxie::cli {
namespace {

using Words = std::string_view;
constexpr std::array<Words, 2> kBackends = {"cpu", "cuda"};
constexpr std::array<Words, 2> kDTypes = {"f32", "bf16"};
constexpr std::array<Words, 2> kIdTypes = {"i32", "i64"};
constexpr std::array<Words, 3> kActivations = {"swiglu", "swiglu_clamped", "gpt_oss"};
constexpr std::array<Words, 2> kRouters = {"softmax", "sigmoid"};
constexpr std::array<Words, 2> kOrders = {"slabs", "lag"};
constexpr std::array<Words, 2> kModes = {"fused", "split"};
constexpr std::array<Words, 2> kDispatches = {"pull", "push"};
constexpr std::array<Words, 2> kCombines = {"epilogue", "comm_workers"};
constexpr std::array<Words, 3> kSaves = {"none", "z", "z+x"};
constexpr std::array<Words, 3> kGemms = {"automatic", "onednn", "plain"};

template <class Enum>
CLI::Option* add_optional_choice(CLI::App& app, const char* name, std::optional<Enum>& target,
                                 std::span<const Words> known, const std::string& help) {
  std::string value_name;
  for (const auto word : known) value_name += (value_name.empty() ? "" : "|") + std::string(word);
  return add_text(app, name, value_name.c_str(), help,
                  [&target, name, known](const std::string& text) {
                    target = static_cast<Enum>(parse_choice(name, text, known));
                  });
}

std::vector<std::int64_t> parse_tokens(const std::string& text) {
  std::vector<std::int64_t> tokens;
  const auto parts = split(text, ',');
  for (std::size_t i = 0; i < parts.size(); ++i) {
    const std::string what =
        parts.size() == 1 ? "--tokens" : "--tokens of rank " + std::to_string(i);
    tokens.push_back(parse_integer(what, parts[i], kInt32));
  }
  return tokens;
}

}  // namespace

void add_shape_options(CLI::App& app, RunOptions& o) {
  constexpr Range kPositive{1, kInt32.max};
  const auto group = [](CLI::Option* option) { option->group(kShapeGroup); };
  group(add_text(app, "--preset", "NAME",
                 "a published layer (`moxie presets`); other shape options override its parts",
                 [&o](const std::string& text) { o.preset = find_preset(text).name; }));
  group(add_integer(
      app, "--scale-down", o.scale_down, kPositive,
      "divide H, I, E and the shared expert by N, to legal sizes, so that a preset fits a laptop"));
  group(add_integer(app, "--ranks", o.ranks, kPositive,
                    "number of ranks the experts are spread over [4]"));
  group(add_text(app, "--tokens", "N|N,N,...",
                 "tokens of every rank, or one number per rank, 0 allowed [256]",
                 [&o](const std::string& text) { o.tokens = parse_tokens(text); }));
  group(add_integer(app, "--hidden", o.hidden, kInt32, "H, a multiple of 64 [512]"));
  group(add_integer(app, "--intermediate", o.intermediate, kInt32,
                    "I of each expert, a multiple of 64 [512]"));
  group(add_integer(app, "--experts", o.experts, kInt32, "E over all ranks [16]"));
  group(add_integer(app, "--top-k", o.top_k, kInt32, "K experts per token [4]"));
  group(add_integer(app, "--shared-intermediate", o.shared_intermediate, kInt32,
                    "I of the shared expert, 0: none [256]"));
  group(app.add_flag("--shared-output-gate", o.shared_output_gate,
                     "multiply its output by sigmoid(x . v)"));
  group(add_optional_choice(app, "--activation", o.activation, kActivations, "[swiglu]"));
  group(add_text(app, "--limit", "X", "clamp of swiglu_clamped and gpt_oss [7]",
                 [&o](const std::string& text) { o.limit = parse_real("--limit", text, 0); }));
  group(add_text(app, "--alpha", "X", "of gpt_oss [1.702]",
                 [&o](const std::string& text) { o.alpha = parse_real("--alpha", text, 0); }));
  group(app.add_flag("--bias", o.bias, "biases on gate, up and down"));
  group(add_optional_choice(app, "--dtype", o.dtype, kDTypes,
                            "storage of activations and weights [bf16]"));
}

namespace {

void add_input(CLI::App& app, RunOptions& o) {
  const auto group = [](CLI::Option* option) { option->group("Input"); };
  group(add_text(app, "--text", "FILE",
                 "embed the bytes of this file and route them with a router [README.md]",
                 [&o](const std::string& text) { o.text = text; }));
  group(add_text(app, "--routing", "KIND",
                 "router | uniform | zipf[:EXPONENT] | hot[:EXPERT] | FILE.npy ([all tokens, K], "
                 "or a name with {rank}); "
                 "x is random unless --text is given",
                 [&o](const std::string& text) { o.routing = parse_routing(text); }));
  group(add_optional_choice(app, "--router", o.router, kRouters,
                            "how the router scores [softmax, or the preset's]"));
  group(add_text(app, "--inputs", "DIR",
                 "everything from a folder that --dump wrote, or that another program made",
                 [&o](const std::string& text) { o.inputs = text; }));
  group(add_text(app, "--ids", "i32|i64", "type of the expert ids [i32]",
                 [&o](const std::string& text) {
                   o.ids = parse_choice("--ids", text, kIdTypes) == 0 ? DType::i32 : DType::i64;
                 }));
  group(add_integer(app, "--seed", o.seed, Range{},
                    "of weights, embedding, router and random input [1]"));
}

void add_work(CLI::App& app, RunOptions& o) {
  const auto group = [](CLI::Option* option) { option->group("Work"); };
  add_backend_option(app, o.backend)->group("Work");
  group(app.add_flag("--backward", o.backward, "forward and backward (the default)"));
  group(app.add_flag("--forward-only", o.forward_only, "no backward pass"));
  group(add_integer(app, "--repeat", o.repeat, Range{1, 1'000'000},
                    "timed passes: median, p10, p90 [3]"));
  group(app.add_flag(
      "--check", o.check,
      "compare with plain FP64 loops, and repeat under other plans for the same bits"));
  group(add_integer(app, "--check-tokens", o.check_tokens, Range{1, kInt32.max},
                    "tokens to check [what takes a second or two]"));
  group(add_choice(app, "--grads", o.grads, kDTypes, "type of the weight gradients [f32]"));
  group(
      add_text(app, "--timeout", "S", "bound of every wait in seconds, 0: none [300]",
               [&o](const std::string& text) { o.timeout_s = parse_real("--timeout", text, 0); }));
  group(app.add_flag("--validate", o.validate,
                     "look for NaN and infinity in every input before each pass"));
  group(add_integer(app, "--shuffle", o.shuffle, Range{},
                    "seed of random delays before every protocol step, 0: none [0]"));
  group(add_integer(app, "--kill-rank", o.kill_rank, kInt32,
                    "a worker of this rank ends silently: shows how a lost peer is reported"));
  group(add_choice(app, "--gemm", o.gemm, kGemms, "what the tiles run on [automatic]"));
}

std::vector<int> parse_devices(const std::string& text) {
  std::vector<int> devices;
  for (const std::string_view part : split(text, ',')) {
    const std::string what = "--devices of rank " + std::to_string(devices.size());
    devices.push_back(static_cast<int>(parse_integer(what, part, kInt32)));
  }
  return devices;
}

void add_results(CLI::App& app, RunOptions& o) {
  const auto group = [](CLI::Option* option) { option->group("Results"); };
  group(add_text(app, "--trace", "PREFIX",
                 "write PREFIX.svg (picture) and PREFIX.json (for ui.perfetto.dev)",
                 [&o](const std::string& text) { o.trace = text; }));
  group(add_text(app, "--dump", "DIR", "write all inputs and results as .npy into a new folder",
                 [&o](const std::string& text) { o.dump = text; }));
  group(add_text(app, "--json", "FILE",
                 "write the report as JSON; - writes it to standard output, instead of the table",
                 [&o](const std::string& text) { o.json = text; }));
}

}  // namespace

CLI::Option* add_backend_option(CLI::App& app, BackendKind& backend) {
  return add_choice(app, "--backend", backend, kBackends, "[cpu]");
}

bool any_given(const CLI::App& app, const char* group) {
  for (const CLI::Option* option : app.get_options([](const CLI::Option*) { return true; }))
    if (option->get_group() == group && option->count() > 0) return true;
  return false;
}

void add_plan_options(CLI::App& app, Plan& p) {
  const auto group = [](CLI::Option* option) { option->group(kPlanGroup); };
  group(add_choice(app, "--mode", p.mode, kModes, "one pass, or stage after stage [fused]"));
  group(add_choice(app, "--order", p.order, kOrders, "order of the FC1 and FC2 tiles [slabs]"));
  group(add_choice(app, "--dispatch", p.dispatch, kDispatches,
                   "forward: experts' ranks pull rows, or home ranks push them [pull]"));
  group(add_choice(app, "--combine", p.combine, kCombines,
                   "forward: who carries results home: the FC2 tile, or communication workers "
                   "[epilogue]"));
  group(add_integer(app, "--slabs", p.num_slabs, kInt32, "column slabs of FC2 [4]"));
  group(add_integer(app, "--band", p.band_blocks, kInt32, "blocks that share a raster band [8]"));
  group(add_integer(app, "--lag", p.lag_bands, kInt32, "lag order: bands between FC1 and FC2 [2]"));
  group(add_integer(app, "--minibatch", p.minibatch_blocks, kInt32,
                    "blocks that share a readiness counter [1]"));
  group(add_integer(app, "--capacity-rows", p.capacity_rows, Range{},
                    "rows a rank can take, 0: the worst case [0]"));
  group(
      add_integer(app, "--x-ring", p.x_ring_blocks, Range{}, "slots for pulled rows, 0: all [0]"));
  group(add_integer(app, "--hidden-ring", p.hidden_ring_blocks, Range{},
                    "slots for hidden rows, 0: all [0]"));
  group(add_integer(
      app, "--chunk", p.chunk_blocks, kInt32,
      "backward: blocks handed to wgrad at a time, 0: whole experts, or by the ring [0]"));
  group(add_integer(app, "--lag-chunks", p.lag_chunks, kInt32,
                    "backward: chunks dgrad runs ahead, 0: enough of them [0]"));
  group(add_integer(app, "--backward-ring", p.backward_ring_blocks, Range{},
                    "backward slots, 0: most of the expected rows [0]"));
  group(add_choice(app, "--save", p.save, kSaves, "what forward keeps for backward [z]"));
  group(add_integer(app, "--saved-rows", p.saved_rows, Range{-1},
                    "rows it is kept for, -1: somewhat more than expected; z+x: all [-1]"));
  group(add_integer(app, "--comm-workers", p.comm_workers, kInt32,
                    "communication workers per rank, 0: one thread; on a GPU the spare warps of "
                    "every CTA [0]"));
  group(add_integer(app, "--compute-workers", p.compute_workers, kInt32,
                    "compute workers per rank [1]"));
}

void add_cuda_options(CLI::App& app, CudaOptions& cuda) {
  const auto group = [](CLI::Option* option) { option->group(kCudaGroup); };
  group(add_text(app, "--devices", "N,N,...",
                 "GPU of each rank; one that is named twice holds virtual ranks [rank r on GPU r "
                 "mod count]",
                 [&cuda](const std::string& text) { cuda.devices = parse_devices(text); }));
  group(add_integer(app, "--reserve-sms", cuda.reserve_sms, kInt32,
                    "SMs of each GPU left to other kernels [0]"));
  group(add_integer(app, "--cluster-size", cuda.cluster_size, Range{0, 2},
                    "CTAs that share weights: 1, 2, or 0: by rows per expert [0]"));
}

void add_run_options(CLI::App& app, RunOptions& options) {
  add_shape_options(app, options);
  add_input(app, options);
  add_work(app, options);
  add_cuda_options(app, options.cuda);
  add_plan_options(app, options.plan);
  add_text(app, "--plan-cache", "FILE",
           "where a layer without plan options finds a tuned plan, off: nowhere [`moxie doctor`]",
           [&options](const std::string& text) { options.plan_cache = text; })
      ->group("Work");
  add_results(app, options);
}

}  // namespace moxie::cli
