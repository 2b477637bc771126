// The table of push dispatch as one CTA builds it, against the plain loops; and the search for long
// tables that its readers use.
#include <algorithm>
#include <list>
#include <random>

#include "moxie/device/warp_search.cuh"
#include "moxie/schedule/push_cuda.cuh"
#include "moxie/schedule/push_ref.h"
#include "tests/gpu/gpu_test.h"
#include "tests/support/env.h"

namespace moxie::test {
namespace {

using testing::DeviceBuffer;

__global__ void build_push_kernel(schedule::PushBuild build, pipeline::PushTable table,
                                  int32_t* num_blocks) {
  __shared__ int32_t scratch[64];
  const int32_t blocks = schedule::build_push(build, table, scratch);
  if (threadIdx.x == 0) *num_blocks = blocks;
}

TEST(CudaPushTable, equals_the_plain_loops) {
  MOXIE_NEEDS_GPU();
  std::mt19937_64 rng(test_seed());
  for (int round = 0; round < 60; ++round) {
    const std::int64_t num_ranks = 1 + static_cast<std::int64_t>(rng() % 17),
                       num_experts =
                           round % 10 == 0 ? 1024 : 1 + static_cast<std::int64_t>(rng() % 70);
    Problem p;
    p.num_ranks = num_ranks;
    p.num_experts = num_experts;
    p.shared.intermediate = round % 2 * 64;
    const std::int64_t max_blocks = round % 7 == 6 ? 2 : 4096;
    const auto ranks = static_cast<std::size_t>(num_ranks),
               experts = static_cast<std::size_t>(num_experts);
    // A "heap": route_begin [E + 1], then the number of tokens.
    std::vector<std::vector<std::int32_t>> heaps(ranks);
    std::vector<const std::int32_t*> begins;
    std::vector<std::int32_t> tokens;
    for (auto& heap : heaps) {
      heap.push_back(0);
      for (std::size_t e = 0; e < experts; ++e)
        heap.push_back(heap.back() + static_cast<std::int32_t>(rng() % 3 == 0 ? 0 : rng() % 200));
      tokens.push_back(static_cast<std::int32_t>(rng() % 400));
      heap.push_back(tokens.back());
    }
    for (const auto& heap : heaps) begins.push_back(heap.data());
    std::list<DeviceBuffer<std::int32_t>> buffers;
    std::vector<std::byte*> bases;
    for (const auto& heap : heaps) {
      buffers.emplace_back(heap);
      bases.push_back(reinterpret_cast<std::byte*>(buffers.back().get()));
    }
    const DeviceBuffer<std::byte*> device_bases(bases);
    const RankId me{static_cast<std::int64_t>(rng() % ranks)};

    std::vector<std::int32_t> first_row(experts), expert_block(experts + ranks), shared(ranks),
        units(static_cast<std::size_t>(max_blocks) * ranks + 1);
    const pipeline::PushTable want =
        schedule::build_push(p, me, begins, tokens, max_blocks, first_row.data(),
                             expert_block.data(), shared.data(), units.data());
    DeviceBuffer<std::int32_t> d_first(first_row.size()), d_block(expert_block.size()),
        d_shared(shared.size()), d_units(units.size()), d_blocks(1);
    pipeline::PushTable table = want;
    table.num_blocks = 0;
    table.route_begin =
        reinterpret_cast<const std::int32_t*>(bases[static_cast<std::size_t>(me.v)]);
    table.first_row = d_first.get();
    table.expert_block = d_block.get();
    table.shared_blocks = d_shared.get();
    table.unit_begin = d_units.get();
    build_push_kernel<<<1, schedule::kSortThreads>>>(
        {device_bases.get(), 0, (num_experts + 1) * 4, p.shared.intermediate > 0, max_blocks,
         d_first.get(), d_block.get(), d_shared.get(), d_units.get()},
        table, d_blocks.get());
    MOXIE_CUDA(cudaDeviceSynchronize());
    SCOPED_TRACE(std::to_string(num_ranks) + " ranks, " + std::to_string(num_experts) + " experts");
    ASSERT_EQ(want.num_blocks, d_blocks.to_host()[0]);
    EXPECT_EQ(first_row, d_first.to_host());
    EXPECT_EQ(expert_block, d_block.to_host());
    EXPECT_EQ(shared, d_shared.to_host());
    const std::vector<std::int32_t> got = d_units.to_host();
    const auto used = static_cast<std::ptrdiff_t>(want.num_blocks * num_ranks + 1);
    EXPECT_TRUE(std::equal(units.begin(), units.begin() + used, got.begin()));
  }
}

__global__ void search_kernel(const int32_t* begin, int32_t n, int32_t num_values,
                              int32_t* answers) {
  for (int32_t value = static_cast<int32_t>(threadIdx.x / 32); value < num_values;
       value += static_cast<int32_t>(blockDim.x / 32)) {
    const int32_t answer = device::warp_last_not_above_long(begin, n, value);
    if (threadIdx.x % 32 == 0) answers[value] = answer;
  }
}

TEST(CudaPushTable, long_search_equals_binary_search) {
  MOXIE_NEEDS_GPU();
  std::mt19937_64 rng(test_seed());
  for (const std::int32_t n : {1, 2, 31, 32, 33, 64, 1000, 1024, 1025, 2320, 40000}) {
    std::vector<std::int32_t> begin(1, 0);
    while (begin.size() < static_cast<std::size_t>(n))
      begin.push_back(begin.back() + static_cast<std::int32_t>(rng() % 3));
    const std::int32_t num_values = begin.back() + 2;
    const DeviceBuffer<std::int32_t> table(begin);
    const DeviceBuffer<std::int32_t> answers(static_cast<std::size_t>(num_values));
    search_kernel<<<1, 256>>>(table.get(), n, num_values, answers.get());
    MOXIE_CUDA(cudaDeviceSynchronize());
    const std::vector<std::int32_t> got = answers.to_host();
    for (std::int32_t v = 0; v < num_values; ++v)
      ASSERT_EQ(pipeline::last_not_above(begin.data(), n, v), got[static_cast<std::size_t>(v)])
          << "of " << n << ", value " << v;
  }
}

}  // namespace
}  // namespace moxie::test
