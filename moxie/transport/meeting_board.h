// Where ranks with GPUs meet outside a pass: a board in every rank's GPU memory that its peers
// write. Copies do it, no kernel: a GPU that is full of somebody's kernel does not matter. Every
// wait ends by a clock of this process, and says who did not come.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "moxie/transport/cuda_memory.h"
#include "moxie/transport/deadline.h"
#include "moxie/transport/gpu_ranks.h"

namespace moxie::transport {

class MeetingBoard {
 public:
  static const std::int64_t kNumBytes;  // of a rank

  // `blocks`: kNumBytes zeroes of every rank, seen by all of them. This rank's GPU is `device`.
  MeetingBoard(std::unique_ptr<RankBlocks> blocks, std::int64_t rank, std::int64_t num_ranks,
               int device);
  ~MeetingBoard();  // tells the peers that this rank has closed

  // Contract: GpuRanks::all_gather.
  std::vector<std::string> all_gather(const std::string& what, const std::string& text,
                                      double timeout_s);
  // Tells the peers, who may still come, and meets nobody any more.
  void give_up(const std::string& reason) noexcept;
  bool lost() const { return !ended_because_.empty(); }

 private:
  struct HostCopies;
  cudaError_t tell(std::int64_t text_at, const std::string& text, std::int64_t word_at,
                   std::uint64_t word) noexcept;
  void read(void* into, std::int64_t at, std::size_t num_bytes) const;
  void wait_for_all(const std::string& what, std::uint64_t meeting, const Deadline& deadline);
  [[noreturn]] void lose(const std::string& reason);
  HostCopies& host() const;

  std::unique_ptr<RankBlocks> blocks_;
  const std::int64_t rank_, num_ranks_;
  const int device_;
  std::unique_ptr<CudaStream> stream_;
  std::unique_ptr<MappedHost<HostCopies>> host_;
  std::uint64_t num_meetings_ = 0;
  std::string ended_because_;  // not empty: lost
};

}  // namespace moxie::transport
