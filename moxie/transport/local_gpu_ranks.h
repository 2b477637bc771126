// Ranks that all live in this process: memory of their GPUs, which peer access shows to each other.
#pragma once
#include <memory>
#include <vector>

#include "moxie/transport/gpu_ranks.h"

namespace moxie::transport {

// `devices`: one per rank.
std::unique_ptr<GpuRanks> make_local_gpu_ranks(const std::vector<int>& devices);

}  // namespace moxie::transport
