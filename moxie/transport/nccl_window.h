// Ranks of a world that each have a GPU, in processes or threads of their own: NCCL brings them
// together and maps one block of memory per rank (a symmetric window) into all of them. NCCL moves
// no data: kernels use the addresses, and ranks meet over a window, too (a board in every rank's
// memory that the peers write), so that a lost rank is found by a clock here and not inside NCCL.
//
// With builds whose CUDA has NCCL's headers (MOXIE_HAS_NCCL).
#pragma once
#include <cstdint>
#include <memory>
#include <string>

#include "moxie/transport/gpu_ranks.h"

namespace moxie::transport {

inline constexpr std::size_t kNcclIdBytes = 128;

struct NcclRankOptions {
  std::int64_t rank = 0, num_ranks = 1;
  std::string unique_id;  // kNcclIdBytes, the same on every rank; empty with `comm`
  void* comm = nullptr;   // ncclComm_t of exactly these ranks; a communicator is split off it
  int device = 0;
  std::string library;      // NcclLibrary::load
  std::string description;  // must be the same on every rank
  double timeout_s = 300;
};

// A fresh id; it needs no GPU. The process that made it must live until the world stands.
std::string make_nccl_id(const std::string& library);

// Waits for all ranks. Throws Error, on every rank that is there: timeout when not all come,
// unavailable when NCCL or the machine cannot do it, when the ranks do not share one NVLink domain,
// invalid_argument when ranks disagree.
std::unique_ptr<GpuRanks> make_nccl_ranks(const NcclRankOptions& options);

}  // namespace moxie::transport
