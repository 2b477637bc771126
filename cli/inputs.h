// The inputs of a run: weights and activations, from a text, from random numbers, or from a dump.
#pragma once
#include <string>
#include <vector>

#include "cli/progress.h"
#include "cli/run_options.h"
#include "cli/tensors.h"

namespace moxie::cli {

struct Inputs {
  std::vector<RankTensors> ranks;
  std::string
      origin;  // one line for people: "bytes 0 .. 1023 of README.md", "random", "folder DIR"
};
Inputs make_inputs(const RunOptions& options, const Setup& setup, Progress& progress);

// Throws Usage with a --scale-down that fits when this machine has not the memory for the tensors
// of the run.
void check_memory(const RunOptions& options, const Setup& setup);

}  // namespace moxie::cli
