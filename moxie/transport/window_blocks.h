// A window of NCCL: a block of memory per rank, each on its rank's GPU and mapped into every rank.
#pragma once
#include <memory>
#include <string>

#include "moxie/transport/gpu_ranks.h"
#include "moxie/transport/nccl_api.h"

namespace moxie::transport {

class WindowBlocks final : public RankBlocks {
 public:
  // This rank's part: zeroes on the communicator's GPU. `what` stands in sentences.
  WindowBlocks(std::shared_ptr<NcclComm> comm, std::int64_t num_bytes, const std::string& what);
  // Asks nobody: peers that have the memory mapped keep it alive.
  ~WindowBlocks() override;
  // The other ranks' parts; all of them at once, each with the same size.
  void map(std::int64_t rank, std::int64_t num_ranks, const Deadline& deadline);

 private:
  [[noreturn]] void refuse(const std::string& why) const;
  void require_symmetric() const;

  std::shared_ptr<NcclComm> comm_;
  void* memory_ = nullptr;
  ncclWindow_t window_ = nullptr;
};

}  // namespace moxie::transport
