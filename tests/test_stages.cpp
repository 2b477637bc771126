// Dispatch, combine and merge by themselves, on heaps of 0xFF: rows come from the right token,
// pieces land in the right slot and nowhere else, masked slots are never read.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <vector>

#include "moxie/combine/combine.h"
#include "moxie/combine/combine_ref.h"
#include "moxie/dispatch/dispatch.h"
#include "moxie/dispatch/dispatch_ref.h"
#include "moxie/merge/merge.h"
#include "moxie/merge/merge_ref.h"
#include "moxie/schedule/schedule.h"
#include "moxie/transport/peer_memory.h"

namespace moxie {
namespace {

using pipeline::Range;
using pipeline::RowOrigin;

constexpr std::int64_t kHidden = 64, kTopK = 3, kTokens = 5;

struct Heaps {
  Problem problem{.num_ranks = 2,
                  .max_tokens = kTokens,
                  .hidden = kHidden,
                  .intermediate = 64,
                  .num_experts = 2,
                  .top_k = kTopK,
                  .dtype = DType::f32};
  pipeline::HeapLayout layout = pipeline::heap_layout(problem);
  transport::InProcessHeaps heaps{2};
  Heaps() {
    heaps.reserve(layout.num_bytes);
    for (int r = 0; r < 2; ++r)
      std::memset(heaps.memory().at<std::byte>(RankId{r}, 0), 0xFF,
                  static_cast<std::size_t>(layout.num_bytes));
  }
  float* at(int rank, const pipeline::Region& region) {
    return heaps.memory().at<float>(RankId{rank}, region.offset);
  }
};

TEST(StageDispatch, PullsTheRowOfTheRoutesToken) {
  Heaps h;
  for (int r = 0; r < 2; ++r)
    for (std::int64_t t = 0; t < kTokens; ++t)
      for (std::int64_t j = 0; j < kHidden; ++j)
        h.at(r, h.layout.x_in)[t * kHidden + j] = static_cast<float>(1000 * r + 10 * t);
  const std::vector<RowOrigin> origins = {
      {1, 4 * kTopK + 2, 1.0f}, {0, 0, 1.0f}, {0, 2 * kTopK + 1, 1.0f}};
  std::vector<float> block(4 * kHidden, -1.0f), keep(block);
  dispatch::pull_rows(h.heaps.memory(), origins.data(), Range{1, 3}, kTopK, kHidden * 4,
                      {h.layout.x_in.offset, reinterpret_cast<std::byte*>(block.data()),
                       reinterpret_cast<std::byte*>(keep.data())});
  EXPECT_EQ(block[0], -1.0f);  // row 0 was not asked for
  EXPECT_EQ(block[kHidden], 0.0f);
  EXPECT_EQ(block[2 * kHidden + 63], 20.0f);
  EXPECT_EQ(block[3 * kHidden], -1.0f);
  EXPECT_EQ(keep, block);
}

TEST(StageCombine, PushesPiecesToTheirSlotsOnly) {
  Heaps h;
  const std::vector<RowOrigin> origins = {{1, 7, 1.0f}, {0, 2, 1.0f}};
  const std::vector<float> pieces = {1, 2, 3, 4, 5, 6};  // [2, 3]
  combine::push_pieces<float>(h.heaps.memory(), h.layout.returns.offset, origins.data(), 2,
                              Range{10, 13}, kHidden, pieces.data());
  std::int64_t written = 0;
  for (int r = 0; r < 2; ++r)
    for (std::int64_t i = 0; i < kTokens * kTopK * kHidden; ++i)
      written += !std::isnan(h.at(r, h.layout.returns)[i]);
  EXPECT_EQ(written, 6);
  EXPECT_EQ(h.at(1, h.layout.returns)[7 * kHidden + 10], 1.0f);
  EXPECT_EQ(h.at(0, h.layout.returns)[2 * kHidden + 12], 6.0f);
}

TEST(StageMerge, SkipsMaskedSlotsAndGivesExactZero) {
  const std::vector<std::int32_t> ids = {0, -1, 1, -1, -1, -1};  // two tokens
  std::vector<float> returns(2 * kTopK * kHidden, std::nanf("")), out(2 * kHidden, std::nanf(""));
  for (std::int64_t j = 0; j < kHidden; ++j) {
    returns[static_cast<std::size_t>(j)] = 1.0f;
    returns[static_cast<std::size_t>(2 * kHidden + j)] = 0.5f;
  }
  merge::merge_tokens<float>(ids.data(), returns.data(), nullptr, Range{0, 2}, Range{0, kHidden},
                             kTopK, kHidden, out.data());
  for (std::int64_t j = 0; j < kHidden; ++j) {
    EXPECT_EQ(out[static_cast<std::size_t>(j)], 1.5f);
    EXPECT_EQ(out[static_cast<std::size_t>(kHidden + j)], 0.0f);
  }
}

TEST(StageMerge, SumsInSlotOrderInFp32) {
  const std::vector<std::int32_t> ids = {0, 0, 0};
  std::vector<float> returns(kTopK * kHidden), out(kHidden);
  for (std::int64_t j = 0; j < kHidden; ++j) {
    returns[static_cast<std::size_t>(j)] = 1e8f;
    returns[static_cast<std::size_t>(kHidden + j)] = -1e8f;
    returns[static_cast<std::size_t>(2 * kHidden + j)] = 1.0f;
  }
  merge::merge_tokens<float>(ids.data(), returns.data(), nullptr, Range{0, 1}, Range{0, kHidden},
                             kTopK, kHidden, out.data());
  EXPECT_EQ(out[0], 1.0f);  // any other order loses the one
}

TEST(StageCosts, CountBytesPerTrip) {
  const Problem p{.num_ranks = 4,
                  .max_tokens = 128,
                  .hidden = 1024,
                  .intermediate = 512,
                  .num_experts = 16,
                  .top_k = 4};
  EXPECT_EQ(dispatch::cost(p, 100, 75, 1).link_bytes, 75 * (1024 * 2 + 8));
  EXPECT_EQ(combine::cost(p, 100, 75).link_bytes, 75 * 1024 * 2);
  EXPECT_EQ(merge::cost(p, 10).flops, 10 * 4 * 1024);
  EXPECT_EQ(schedule::cost(p, 400).flops, 0);
}

}  // namespace
}  // namespace moxie
