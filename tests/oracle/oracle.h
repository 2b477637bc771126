// FP64 oracle of the whole layer: plain loops over routes, no blocks, no ranks, no intermediate
// rounding. It shares no code with moxie/, only the plain data types Problem and Activation, so
// that a mistake cannot be made twice. Every tensor is a row-major std::vector<double>; an absent
// part is an empty vector.
#pragma once
#include <cstdint>
#include <vector>

#include "moxie/core/problem.h"

namespace oracle {

struct Params {
  std::vector<double> gate, up;                // [E, I, H]
  std::vector<double> down;                    // [E, H, I]
  std::vector<double> gate_bias, up_bias;      // [E, I]
  std::vector<double> down_bias;               // [E, H]
  std::vector<double> shared_gate, shared_up;  // [I_s, H]
  std::vector<double> shared_down;             // [H, I_s]
  std::vector<double> shared_output_gate;      // [H]
};

struct Tokens {
  std::int64_t num_tokens = 0;           // N
  std::vector<double> x;                 // [N, H]
  std::vector<std::int64_t> expert_ids;  // [N, K], -1: no route
  std::vector<double> route_weights;     // [N, K], not read where the id is -1
};

struct Gradients {
  std::vector<double> dx;               // [N, H]
  std::vector<double> d_route_weights;  // [N, K]
  Params params;                        // same shapes as the parameters
  // These elements are sums: over tokens, and over columns for a route weight. Where large terms
  // cancel, rounding errors are small against the terms, not against the sum; so here are the
  // sums of the squared terms.
  Params squares;
  std::vector<double> d_route_squares;  // [N, K]
};

std::vector<double> forward(const moxie::Problem& problem, const Params& params,
                            const Tokens& tokens);  // [N, H]
Gradients backward(const moxie::Problem& problem, const Params& params, const Tokens& tokens,
                   const std::vector<double>& dy);  // dy [N, H]

}  // namespace oracle
