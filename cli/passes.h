// Runs passes of one layer and times them, and judges that other plans give the same bits.
#pragma once
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "cli/device_tensors.h"
#include "cli/progress.h"
#include "cli/run_options.h"
#include "cli/tensors.h"
#include "moxie/moxie.h"

namespace moxie::cli {

struct Samples {
  std::vector<double> ms;             // in the order they were taken
  double percentile(double p) const;  // 0 .. 100; nearest rank
  double median() const { return percentile(50); }
};

struct PassTimes {
  Samples forward, backward;
  std::vector<trace::Trace> traces;  // of one further pass, forward and then backward
};

// One warm-up pass, `repeat` timed ones, one traced one. Leaves the results of the last pass in
// `results`. With `device` the passes run on the mirrors of inputs and results.
PassTimes run_passes(World& world, Layer& layer, const Setup& setup,
                     std::span<const RankTensors> inputs, std::span<RankResults> results,
                     const DeviceTensors* device, Progress& progress);

struct SameBits {
  bool ok = true;
  std::vector<std::string> plans;  // what was tried, in words
  std::string difference;          // where the first difference is
};
// The same passes in lag order with the smallest rings and shuffled timing (on the CPU with two
// workers of each role), and in split mode.
SameBits check_same_bits(World& world, const RunOptions& options, const Setup& setup,
                         std::span<const RankTensors> inputs, std::span<const RankResults> results,
                         Progress& progress);

}  // namespace moxie::cli
