// Which library computes the GEMM tiles of the CPU twin; expert/host_gemm.h is the engine behind
// it.
#pragma once
#include <cstdint>

namespace moxie {

enum class HostGemm : std::int32_t {
  automatic,  // oneDNN if built in and its rows pass the self-check, else plain
  onednn,
  plain,  // plain loops: slow, and what the thread sanitizer can see into
};

}  // namespace moxie
