// Everything a forward and a backward write, for all ranks, poisoned before use; comparison bit for
// bit.
#pragma once
#include <gtest/gtest.h>

#include <array>
#include <string>
#include <vector>

#include "tests/support/layer_case.h"

namespace moxie::test {

struct RankOutputs {
  OwnedTensor y, dx, d_route_weights;
  std::array<OwnedTensor, kNumParts> grads;
};

class PassOutputs {
 public:
  // Matrices of the gradients get `grad_dtype`.
  explicit PassOutputs(const LayerCase& layer_case, DType grad_dtype = DType::f32);

  std::vector<RankOutputs> ranks;

  std::vector<ForwardOutput> forward();
  std::vector<BackwardOutput> backward(bool accumulate = false);
  // Sets every gradient element to a value that depends on its place: a main-grad that already
  // holds something.
  void prefill_grads();
  static double prefilled(std::size_t part, std::size_t index);

  // y only, or the gradients only.
  bool forward_untouched() const;
  bool backward_untouched() const;
};

// Forward and backward into fresh outputs.
PassOutputs run_pass(Layer& layer, const LayerCase& layer_case, DType grad_dtype = DType::f32);
// The same in a world of its own.
PassOutputs run_alone(const LayerCase& layer_case, const Plan& plan = {},
                      DType grad_dtype = DType::f32);

// Names the first rank, tensor and element that differ.
::testing::AssertionResult same_bits(const PassOutputs& want, const PassOutputs& got);
::testing::AssertionResult same_bits(const std::string& what, const OwnedTensor& want,
                                     const OwnedTensor& got);

}  // namespace moxie::test
