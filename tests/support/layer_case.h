// One random layer problem: global values in FP64 (all exactly representable in the storage type)
// and, made of them, the buffers of every rank. The global values depend on the seed and the total
// number of tokens only, not on how tokens and experts are divided: the same case can be run at R =
// 1, 2, 3, ...
#pragma once
#include <array>
#include <cstdint>
#include <vector>

#include "moxie/moxie.h"
#include "tests/oracle/oracle.h"
#include "tests/support/owned_tensor.h"

namespace moxie::test {

enum class Routing {
  uniform,     // K different experts, all equally likely
  zipf,        // K different experts, the first ones far more likely
  one_expert,  // every slot of every token: the last expert
  masked,      // uniform, then a third of the slots -1 and every fifth token without any route
  duplicates,  // zipf with repetition: the same expert several times in one token
};

struct CaseSpec {
  Problem problem;
  std::vector<std::int64_t> tokens;  // per rank
  Routing routing = Routing::uniform;
  DType id_dtype = DType::i64;
};

// A problem with everything a test does not care about filled in.
Problem small_problem(std::int64_t num_ranks, std::int64_t num_experts, std::int64_t top_k,
                      std::int64_t hidden = 64, std::int64_t intermediate = 64,
                      DType dtype = DType::f32);
// Every optional part at once: biases, shared expert of another width, output gate.
Problem with_all_parts(Problem problem, ActivationKind kind);

// The parts of the parameters, so that code can walk them.
struct Part {
  const char* name;
  ConstTensorView Weights::*weight;
  TensorView WeightGrads::*grad;
  std::vector<double> oracle::Params::*values;
  bool per_expert;
  bool is_vector;  // its gradient is f32 whatever the others are
};
inline constexpr std::size_t kNumParts = 10;
extern const std::array<Part, kNumParts> kParts;
// Shape on a rank with `num_experts` experts; absent when the problem has no such part.
Shape part_shape(const Problem& problem, std::size_t part, std::int64_t num_experts);

struct Span {
  std::int64_t begin = 0, end = 0;
  std::int64_t size() const { return end - begin; }
};

struct RankInputs {
  OwnedTensor x, expert_ids, route_weights, dy;
  std::array<OwnedTensor, kNumParts> weights;
};

class LayerCase {
 public:
  LayerCase(const CaseSpec& spec, std::uint64_t seed);

  CaseSpec spec;
  oracle::Params params;
  oracle::Tokens tokens;  // of all ranks, in rank order; weights of masked slots are NaN
  std::vector<double> dy;
  std::vector<RankInputs> ranks;

  const Problem& problem() const { return spec.problem; }
  std::int64_t num_ranks() const { return spec.problem.num_ranks; }
  Span tokens_of(std::int64_t rank) const;   // into the global tokens
  Span experts_of(std::int64_t rank) const;  // into the global experts
  std::int64_t& expert_id(std::int64_t token, std::int64_t slot) {
    return tokens.expert_ids[static_cast<std::size_t>(token * problem().top_k + slot)];
  }
  double& route_weight(std::int64_t token, std::int64_t slot) {
    return tokens.route_weights[static_cast<std::size_t>(token * problem().top_k + slot)];
  }
  // Writes the global values into the rank buffers again; call it after changing them.
  void upload();
  // Token t has one route (K = 1), in random order, so that expert e gets exactly rows[e] rows.
  void route_exactly(const std::vector<std::int64_t>& rows, std::uint64_t seed);

  std::vector<ForwardInput> forward_inputs() const;
  std::vector<BackwardInput> backward_inputs() const;

 private:
  Weights weights_of(std::int64_t rank) const;
};

}  // namespace moxie::test
