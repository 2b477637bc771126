// The judge of a run: plain FP64 loops over the layer's definition, written from the definition and
// sharing nothing with the library but its data types. Results are compared tensor by tensor; a
// wrong single row must fail.
#pragma once
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "cli/tensors.h"

namespace moxie::cli {

struct CheckedTensor {
  std::string name;
  double relative_l2 = 0, limit = 0;  // over all elements looked at
  double worst = 0;  // largest |d| / (a * rms of the row + a * |reference|); more than 1 fails
  std::int64_t elements = 0;
  bool ok() const { return relative_l2 <= limit && worst <= 1; }  // false for NaN
};

struct CheckReport {
  std::vector<CheckedTensor> tensors;
  std::int64_t tokens_checked = 0, tokens = 0;
  std::int64_t columns_checked = 0, columns = 0;  // of I, in the weight gradients of each expert
  bool ok() const;
  // "rank 1 token 17: y[3] is ..., expected ...": the worst element, for the error sentence.
  std::string worst_element;
  double worst = 0;
};

struct CheckOptions {
  std::int64_t tokens = -1;   // to check; -1: as many as the budget allows
  std::int64_t columns = -1;  // of I to check in the weight gradients; -1: likewise
  bool backward = true;
  std::uint64_t seed = 1;
  std::function<void(double)> progress;  // 0 .. 1
};

CheckReport check_results(const Problem& problem, std::span<const RankTensors> inputs,
                          std::span<const RankResults> results, const CheckOptions& options);

}  // namespace moxie::cli
