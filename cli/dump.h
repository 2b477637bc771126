// Everything a pass reads and writes as .npy files, one folder per rank, and problem.json beside
// them: the interface to outside programs (docs/dump-format.md). What is dumped can be fed back
// with --inputs and gives the same bits.
#pragma once
#include <filesystem>
#include <span>
#include <string>
#include <vector>

#include "cli/run_options.h"
#include "cli/tensors.h"

namespace moxie::cli {

// Adds the results only as far as they are allocated. `origin` tells in one line where the data
// came from.
void write_dump(const std::filesystem::path& staging, const Setup& setup, const Plan& plan,
                const std::string& origin, std::span<const RankTensors> inputs,
                std::span<const RankResults> results);

// Shape, tokens per rank and type of the ids out of DIR/problem.json, the rest of `setup` as the
// options say.
void read_dump_setup(const std::string& folder, Setup& setup);
// dy may be missing when the backward pass does not run. Throws Failure naming the file.
std::vector<RankTensors> read_dump_inputs(const std::string& folder, const Setup& setup);

}  // namespace moxie::cli
