// The table of tensors, and views of them in the shape moxie.h wants.
#include "cli/tensors.h"

#include <array>
#include <stdexcept>
#include <string>
#include <string_view>

#include "cli/device_tensors.h"

namespace moxie::cli {
namespace {

constexpr std::array kInputs = {
    InputName{"x", &RankTensors::x},
    InputName{"expert_ids", &RankTensors::expert_ids},
    InputName{"route_weights", &RankTensors::route_weights},
    InputName{"gate", &RankTensors::gate},
    InputName{"up", &RankTensors::up},
    InputName{"down", &RankTensors::down},
    InputName{"gate_bias", &RankTensors::gate_bias},
    InputName{"up_bias", &RankTensors::up_bias},
    InputName{"down_bias", &RankTensors::down_bias},
    InputName{"shared_gate", &RankTensors::shared_gate},
    InputName{"shared_up", &RankTensors::shared_up},
    InputName{"shared_down", &RankTensors::shared_down},
    InputName{"shared_output_gate", &RankTensors::shared_output_gate},
    InputName{"dy", &RankTensors::dy},
};
constexpr std::array kResults = {
    ResultName{"y", &RankResults::y, false},
    ResultName{"dx", &RankResults::dx, true},
    ResultName{"d_route_weights", &RankResults::d_route_weights, true},
    ResultName{"d_gate", &RankResults::d_gate, true},
    ResultName{"d_up", &RankResults::d_up, true},
    ResultName{"d_down", &RankResults::d_down, true},
    ResultName{"d_gate_bias", &RankResults::d_gate_bias, true},
    ResultName{"d_up_bias", &RankResults::d_up_bias, true},
    ResultName{"d_down_bias", &RankResults::d_down_bias, true},
    ResultName{"d_shared_gate", &RankResults::d_shared_gate, true},
    ResultName{"d_shared_up", &RankResults::d_shared_up, true},
    ResultName{"d_shared_down", &RankResults::d_shared_down, true},
    ResultName{"d_shared_output_gate", &RankResults::d_shared_output_gate, true},
};

HostTensor allocate(const TensorSpec& spec) {
  return spec.shape.rank == 0 ? HostTensor{} : HostTensor{spec.dtype, spec.shape};
}

// Finds the array that a pass is to read or write.
struct View {
  const DeviceTensors* device;
  ConstTensorView operator()(const HostTensor& tensor) const {
    return device == nullptr ? tensor.view() : ConstTensorView(device->mirror(tensor));
  }
  TensorView operator()(HostTensor& tensor) const {
    return device == nullptr ? tensor.view() : device->mirror(tensor);
  }
};

Weights weights_of(const RankTensors& rank, const View& view) {
  return {.gate = view(rank.gate),
          .up = view(rank.up),
          .down = view(rank.down),
          .gate_bias = view(rank.gate_bias),
          .up_bias = view(rank.up_bias),
          .down_bias = view(rank.down_bias),
          .shared_gate = view(rank.shared_gate),
          .shared_up = view(rank.shared_up),
          .shared_down = view(rank.shared_down),
          .shared_output_gate = view(rank.shared_output_gate)};
}

}  // namespace

HostTensor::HostTensor(DType dtype_in, Shape shape_in)
    : dtype(dtype_in),
      shape(shape_in),
      bytes(static_cast<std::size_t>(shape_in.num_elements() * size_bytes(dtype_in))) {}

std::span<const InputName> input_names() { return kInputs; }
std::span<const ResultName> result_names() { return kResults; }

TensorSpec tensor_spec(const Problem& problem, const RunTypes& types, std::int64_t rank,
                       std::int64_t num_tokens, std::string_view name) {
  const std::int64_t T = num_tokens, K = problem.top_k, H = problem.hidden,
                     I = problem.intermediate;
  const std::int64_t I_s = problem.shared.intermediate;
  const std::int64_t E_local =
      num_local_experts(problem.num_experts, problem.num_ranks, RankId{rank});
  const bool gradient = name.starts_with("d_") && name != "d_route_weights";
  const std::string_view base = gradient ? name.substr(2) : name;
  const DType matrix = gradient ? types.matrix_grads : problem.dtype;
  const DType vector = gradient ? DType::f32 : problem.dtype;
  const TensorSpec absent;
  if (base == "x" || base == "y" || base == "dx" || base == "dy") return {problem.dtype, {T, H}};
  if (base == "expert_ids") return {types.ids, {T, K}};
  if (base == "route_weights" || base == "d_route_weights") return {DType::f32, {T, K}};
  if (base == "gate" || base == "up") return {matrix, {E_local, I, H}};
  if (base == "down") return {matrix, {E_local, H, I}};
  if (base.ends_with("_bias")) {
    if (!problem.expert_bias) return absent;
    return {vector, {E_local, base == "down_bias" ? H : I}};
  }
  if (base == "shared_output_gate")
    return problem.shared.output_gate ? TensorSpec{vector, {H}} : absent;
  if (base.starts_with("shared_")) {
    if (I_s == 0) return absent;
    return base == "shared_down" ? TensorSpec{matrix, {H, I_s}} : TensorSpec{matrix, {I_s, H}};
  }
  throw std::logic_error("no tensor is called " + std::string(name));
}

RankTensors allocate_inputs(const Problem& problem, const RunTypes& types, std::int64_t rank,
                            std::int64_t num_tokens) {
  RankTensors tensors;
  for (const auto& [name, member] : kInputs) {
    tensors.*member = allocate(tensor_spec(problem, types, rank, num_tokens, name));
  }
  return tensors;
}

RankResults allocate_results(const Problem& problem, const RunTypes& types, std::int64_t rank,
                             std::int64_t num_tokens, bool backward) {
  RankResults results;
  for (const auto& [name, member, of_backward] : kResults) {
    if (of_backward && !backward) continue;
    results.*member = allocate(tensor_spec(problem, types, rank, num_tokens, name));
  }
  return results;
}

std::vector<ForwardInput> forward_inputs(std::span<const RankTensors> ranks,
                                         const DeviceTensors* device) {
  const View view{device};
  std::vector<ForwardInput> inputs;
  for (const RankTensors& rank : ranks) {
    inputs.push_back(
        {view(rank.x), view(rank.expert_ids), view(rank.route_weights), weights_of(rank, view)});
  }
  return inputs;
}

std::vector<ForwardOutput> forward_outputs(std::span<RankResults> ranks,
                                           const DeviceTensors* device) {
  const View view{device};
  std::vector<ForwardOutput> outputs;
  for (RankResults& rank : ranks) outputs.push_back({view(rank.y)});
  return outputs;
}

std::vector<BackwardInput> backward_inputs(std::span<const RankTensors> ranks,
                                           const DeviceTensors* device) {
  const View view{device};
  std::vector<BackwardInput> inputs;
  for (const RankTensors& rank : ranks)
    inputs.push_back({view(rank.x), view(rank.dy), weights_of(rank, view)});
  return inputs;
}

std::vector<BackwardOutput> backward_outputs(std::span<RankResults> ranks,
                                             const DeviceTensors* device) {
  const View view{device};
  std::vector<BackwardOutput> outputs;
  for (RankResults& rank : ranks) {
    outputs.push_back({.dx = view(rank.dx),
                       .d_route_weights = view(rank.d_route_weights),
                       .grads = {.accumulate = false,
                                 .gate = view(rank.d_gate),
                                 .up = view(rank.d_up),
                                 .down = view(rank.d_down),
                                 .gate_bias = view(rank.d_gate_bias),
                                 .up_bias = view(rank.d_up_bias),
                                 .down_bias = view(rank.d_down_bias),
                                 .shared_gate = view(rank.d_shared_gate),
                                 .shared_up = view(rank.d_shared_up),
                                 .shared_down = view(rank.d_shared_down),
                                 .shared_output_gate = view(rank.d_shared_output_gate)}});
  }
  return outputs;
}

double value_at(const HostTensor& tensor, std::int64_t index) {
  const auto i = static_cast<std::size_t>(index);
  switch (tensor.dtype) {
    case DType::f32: return double{tensor.as<float>()[i]};
    case DType::bf16: return double{static_cast<float>(tensor.as<bf16>()[i])};
    case DType::i32: return tensor.as<std::int32_t>()[i];
    case DType::i64: return static_cast<double>(tensor.as<std::int64_t>()[i]);
  }
  return 0;
}

}  // namespace moxie::cli
