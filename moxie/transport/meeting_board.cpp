#if MOXIE_HAS_CUDA
#include "moxie/transport/meeting_board.h"

#include <fmt/format.h>

#include <cstddef>
#include <cstring>
#include <thread>

#include "moxie/core/error.h"

namespace moxie::transport {
namespace {

constexpr std::int64_t kRanks = kMaxGpuRanks, kSlotBytes = 4096;
static_assert(kMaxMeetingText < kSlotBytes);

// A text is written before its word, so whoever sees the word reads the text. Two banks of texts: a
// rank writes into a bank again two meetings later, which begin only after every rank has come to
// the meeting between, and so has read the first.
struct Board {
  std::uint64_t came[kRanks];  // by peer: how many meetings it has come to
  std::uint64_t left[kRanks];  // by peer: a Farewell
  char texts[2][kRanks][kSlotBytes];
  char reasons[kRanks][kSlotBytes];  // of those who gave up
};
enum Farewell : std::uint64_t { kStays = 0, kClosed = 1, kGaveUp = 2 };

constexpr std::int64_t came_at(std::int64_t rank) { return rank * 8; }
constexpr std::int64_t left_at(std::int64_t rank) { return (kRanks + rank) * 8; }
constexpr std::int64_t text_at(std::uint64_t meeting, std::int64_t rank) {
  return static_cast<std::int64_t>(offsetof(Board, texts)) +
         (static_cast<std::int64_t>(meeting % 2) * kRanks + rank) * kSlotBytes;
}
constexpr std::int64_t reason_at(std::int64_t rank) {
  return static_cast<std::int64_t>(offsetof(Board, reasons)) + rank * kSlotBytes;
}

}  // namespace

const std::int64_t MeetingBoard::kNumBytes = sizeof(Board);

struct MeetingBoard::HostCopies {  // pinned
  std::uint64_t came[kRanks], left[kRanks];
  std::uint64_t word;
  char text[kSlotBytes];
  char texts[kRanks][kSlotBytes];
};

MeetingBoard::HostCopies& MeetingBoard::host() const { return (*host_)[0]; }

MeetingBoard::MeetingBoard(std::unique_ptr<RankBlocks> blocks, std::int64_t rank,
                           std::int64_t num_ranks, int device)
    : blocks_(std::move(blocks)), rank_(rank), num_ranks_(num_ranks), device_(device) {
  const DeviceGuard guard(device);
  stream_ = std::make_unique<CudaStream>();
  host_ = std::make_unique<MappedHost<HostCopies>>(1);
}

MeetingBoard::~MeetingBoard() {
  on_device(device_, [&] {
    if (!lost()) tell(reason_at(rank_), "", left_at(rank_), kClosed);
    stream_.reset();
    host_.reset();
  });
}

// A text and then a word into every peer's board.
cudaError_t MeetingBoard::tell(std::int64_t text_offset, const std::string& text,
                               std::int64_t word_offset, std::uint64_t word) noexcept {
  std::memcpy(host().text, text.c_str(), text.size() + 1);
  host().word = word;
  const auto to_peers = [&](std::int64_t at, const void* from, std::size_t num_bytes) {
    for (std::int64_t r = 0; r < num_ranks_; ++r) {
      if (r == rank_) continue;
      const cudaError_t error = cudaMemcpyAsync(blocks_->of(r) + at, from, num_bytes,
                                                cudaMemcpyHostToDevice, stream_->get());
      if (error != cudaSuccess) return error;
    }
    return cudaStreamSynchronize(stream_->get());  // the text is there before the word
  };
  const cudaError_t error = to_peers(text_offset, host().text, text.size() + 1);
  return error != cudaSuccess ? error : to_peers(word_offset, &host().word, sizeof(word));
}

void MeetingBoard::read(void* into, std::int64_t at, std::size_t num_bytes) const {
  check_cuda(cudaMemcpyAsync(into, blocks_->of(rank_) + at, num_bytes, cudaMemcpyDeviceToHost,
                             stream_->get()),
             "reading what the other ranks wrote");
  stream_->synchronize("reading what the other ranks wrote");
}

std::vector<std::string> MeetingBoard::all_gather(const std::string& what, const std::string& text,
                                                  double timeout_s) {
  if (lost()) {
    throw Error(ErrorCode::timeout, fmt::format("{} was called on a World whose ranks have lost "
                                                "each other: {}; make a new World",
                                                what, ended_because_));
  }
  const DeviceGuard guard(device_);
  const Deadline deadline(timeout_s);
  const std::uint64_t meeting = ++num_meetings_;
  const std::string message = (what + '\n' + text).substr(0, kMaxMeetingText);
  check_cuda(tell(text_at(meeting, rank_), message, came_at(rank_), meeting),
             "writing to the other ranks");
  wait_for_all(what, meeting, deadline);
  read(host().texts, text_at(meeting, 0), static_cast<std::size_t>(num_ranks_ * kSlotBytes));
  std::vector<std::string> texts;
  for (std::int64_t r = 0; r < num_ranks_; ++r) {
    const std::string said = r == rank_ ? message : host().texts[r];
    const std::size_t end = said.find('\n');
    if (said.substr(0, end) != what) {
      throw Error(ErrorCode::invalid_argument,
                  fmt::format("rank {} came to {} ({}) where rank {} came to {}, must be the same "
                              "on every rank, in the same order",
                              r, said.substr(0, end), said.substr(end + 1), rank_, what));
    }
    texts.push_back(said.substr(end + 1));
  }
  return texts;
}

void MeetingBoard::wait_for_all(const std::string& what, std::uint64_t meeting,
                                const Deadline& deadline) {
  for (std::int64_t polls = 0;; ++polls) {
    read(host().came, 0, sizeof(host().came) + sizeof(host().left));
    std::string missing;
    for (std::int64_t r = 0; r < num_ranks_; ++r) {
      if (r == rank_ || host().came[r] >= meeting) continue;
      if (host().left[r] == kGaveUp) {
        read(host().text, reason_at(r), kSlotBytes);
        lose(fmt::format("rank {} gave up: {}", r, host().text));
      }
      if (host().left[r] == kClosed)
        lose(fmt::format("rank {} did not come to {}: it has closed its World", r, what));
      missing += (missing.empty() ? "" : ", ") + std::to_string(r);
    }
    if (missing.empty()) return;
    if (deadline.expired()) {
      const std::string reason = fmt::format("rank {} of {} did not come to {} within {} s",
                                             missing, num_ranks_, what, deadline.timeout_s());
      give_up(reason);
      lose(reason);
    }
    std::this_thread::sleep_for(std::chrono::microseconds(polls < 100 ? 20 : 1000));
  }
}

void MeetingBoard::lose(const std::string& reason) {
  ended_because_ = reason;
  throw Error(ErrorCode::timeout, reason + "; make a new World");
}

void MeetingBoard::give_up(const std::string& reason) noexcept {
  ended_because_ = reason.substr(0, kMaxMeetingText);
  on_device(device_, [&] { tell(reason_at(rank_), ended_because_, left_at(rank_), kGaveUp); });
}

}  // namespace moxie::transport
#endif
