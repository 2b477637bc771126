// The judge: is a result close enough to the FP64 oracle? Two conditions, both must hold:
//   over the tensor:  |got - ref|_2 <= rel_l2 * |ref|_2
//   each element:     |got - ref|   <= elementwise * (rms(group) + |ref|)
// A group is one row for activations and one expert's matrix for weight gradients. The second
// condition is what lets no single wrong row through. For gradients that are sums over rows or
// columns, |ref| of an element is at least the root of the sum of its squared terms (see
// oracle::Gradients::squares). A group of zeros must be exactly zero. NaN is never close.
#pragma once
#include <gtest/gtest.h>

#include <cstdint>
#include <span>
#include <string>

#include "tests/support/layer_case.h"
#include "tests/support/pass_outputs.h"

namespace moxie::test {

struct Tolerance {
  double rel_l2 = 0;
  double elementwise = 0;
};
Tolerance tolerance_of(DType storage);

// `group` elements share one rms; 0: the whole tensor. `squares`: empty, or one per element.
// `terms`: empty, or how many rows each group is a sum over: of one row an element may be off by
// twice as much, because its factors' error is multiplied by whatever the other factor is, three
// rms or more.
::testing::AssertionResult close_to(const std::string& what, std::span<const double> ref,
                                    std::span<const double> got, std::int64_t group, Tolerance tol,
                                    std::span<const double> squares = {},
                                    std::span<const std::int64_t> terms = {});

// What the oracle says about a case: global tensors, but shared-expert gradients per rank, for
// every rank sees only its own tokens.
struct Reference {
  std::vector<double> y;
  oracle::Gradients grads;
  std::vector<oracle::Gradients> per_rank;
};
Reference reference_of(const LayerCase& layer_case, bool with_backward = true);

// Adds the weight gradients of `more` into `sum`: what microbatches accumulate to.
void add_weight_grads(Reference& sum, const Reference& more);

// Compares everything (non-fatal failures naming the tensor). `prefilled`: gradients were
// accumulated onto PassOutputs::prefilled values; idle experts must then hold these bits still.
void expect_close(const LayerCase& layer_case, const Reference& reference, const PassOutputs& got,
                  bool with_backward = true, bool prefilled = false);

// run_alone against the oracle.
void expect_right(const LayerCase& layer_case, const Plan& plan = {},
                  DType grad_dtype = DType::f32);

}  // namespace moxie::test
