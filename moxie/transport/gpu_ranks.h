// The seam between the CUDA backend and what holds the ranks together: where a block of GPU memory
// per rank comes from, and how ranks of other processes are met outside a pass. Kernels see
// addresses only.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace moxie::transport {

// Most ranks of a World: a kernel's parameters hold an address of each, a meeting board a slot.
inline constexpr std::int64_t kMaxGpuRanks = 64;

// One block of GPU memory for every rank; this rank's is freed with it.
class RankBlocks {
 public:
  explicit RankBlocks(std::int64_t num_bytes) : num_bytes_(num_bytes) {}
  virtual ~RankBlocks() = default;
  RankBlocks(const RankBlocks&) = delete;
  RankBlocks& operator=(const RankBlocks&) = delete;
  // As the GPUs of this process see it; null: another process's, which does not show it.
  std::byte* of(std::int64_t rank) const { return bases_[static_cast<std::size_t>(rank)]; }
  std::int64_t num_bytes() const { return num_bytes_; }  // of one rank

 protected:
  std::vector<std::byte*> bases_;  // [R]

 private:
  std::int64_t num_bytes_;
};

enum class SeenBy { own_gpu, all_ranks };

class GpuRanks {
 public:
  virtual ~GpuRanks() = default;
  virtual bool of_processes() const = 0;
  virtual bool lost() const { return false; }  // the ranks cannot meet any more
  // GPU memory of one rank that is there for meeting.
  virtual std::int64_t meeting_bytes() const { return 0; }
  // `num_bytes` zeroes for every rank of this process. With SeenBy::all_ranks every rank of the
  // world must call it at once, with the same size. `what` stands in sentences.
  virtual std::unique_ptr<RankBlocks> allocate(std::int64_t num_bytes, const char* what,
                                               SeenBy seen_by, double timeout_s) = 0;
  // All ranks meet: every process gives a text (at most kMaxMeetingText bytes) and receives all of
  // them in rank order. `what` names the call. Throws Error(timeout) when a rank does not come
  // within timeout_s (0: unbounded) or has closed its World; nobody can meet after that.
  virtual std::vector<std::string> all_gather(const char* what, const std::string& text,
                                              double timeout_s) = 0;
};

inline constexpr std::size_t kMaxMeetingText = 4000;

}  // namespace moxie::transport
