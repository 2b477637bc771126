// The arrays of one run on the host: what each rank brings to a pass, and what it gets back. One
// table names them all; allocation, dumps, loading and comparison walk that table, so a tensor is
// added in one place.
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "moxie/moxie.h"

namespace moxie::cli {

// An owned, zero-initialised array. A default one is absent.
struct HostTensor {
  DType dtype = DType::f32;
  Shape shape;
  std::vector<std::byte> bytes;

  HostTensor() = default;
  HostTensor(DType dtype_in, Shape shape_in);
  bool absent() const { return shape.rank == 0; }
  TensorView view() { return absent() ? TensorView{} : TensorView{bytes.data(), dtype, shape}; }
  ConstTensorView view() const {
    return absent() ? ConstTensorView{} : ConstTensorView{bytes.data(), dtype, shape};
  }
  template <class T>
  std::span<T> as() {
    return {reinterpret_cast<T*>(bytes.data()), bytes.size() / sizeof(T)};
  }
  template <class T>
  std::span<const T> as() const {
    return {reinterpret_cast<const T*>(bytes.data()), bytes.size() / sizeof(T)};
  }
};

struct RankTensors {
  HostTensor x, expert_ids, route_weights;         // [T, H], [T, K], [T, K]
  HostTensor gate, up, down;                       // [E_local, I, H] x2, [E_local, H, I]
  HostTensor gate_bias, up_bias, down_bias;        // [E_local, I] x2, [E_local, H]
  HostTensor shared_gate, shared_up, shared_down;  // [I_s, H] x2, [H, I_s]
  HostTensor shared_output_gate;                   // [H]
  HostTensor dy;                                   // [T, H]
};
struct RankResults {
  HostTensor y, dx, d_route_weights;  // [T, H] x2, [T, K]
  HostTensor d_gate, d_up, d_down;    // as the weights
  HostTensor d_gate_bias, d_up_bias, d_down_bias;
  HostTensor d_shared_gate, d_shared_up, d_shared_down;
  HostTensor d_shared_output_gate;
};

struct InputName {
  const char* name;
  HostTensor RankTensors::*member;
};
struct ResultName {
  const char* name;
  HostTensor RankResults::*member;
  bool backward;
};
std::span<const InputName> input_names();
std::span<const ResultName> result_names();

struct RunTypes {
  DType ids = DType::i32;
  DType matrix_grads = DType::f32;
};
// Dtype and shape of a tensor by its name; an absent tensor (shape rank 0) where the problem has no
// such part.
struct TensorSpec {
  DType dtype = DType::f32;
  Shape shape;
};
TensorSpec tensor_spec(const Problem& problem, const RunTypes& types, std::int64_t rank,
                       std::int64_t num_tokens, std::string_view name);

RankTensors allocate_inputs(const Problem& problem, const RunTypes& types, std::int64_t rank,
                            std::int64_t num_tokens);
RankResults allocate_results(const Problem& problem, const RunTypes& types, std::int64_t rank,
                             std::int64_t num_tokens, bool backward);

// Views for a pass: of the host arrays, or of their mirrors on the GPUs.
class DeviceTensors;
std::vector<ForwardInput> forward_inputs(std::span<const RankTensors> ranks,
                                         const DeviceTensors* device = nullptr);
std::vector<ForwardOutput> forward_outputs(std::span<RankResults> ranks,
                                           const DeviceTensors* device = nullptr);
std::vector<BackwardInput> backward_inputs(std::span<const RankTensors> ranks,
                                           const DeviceTensors* device = nullptr);
std::vector<BackwardOutput> backward_outputs(std::span<RankResults> ranks,
                                             const DeviceTensors* device = nullptr);

// Element as a number, whatever its dtype (for loops where speed does not matter).
double value_at(const HostTensor& tensor, std::int64_t index);

}  // namespace moxie::cli
