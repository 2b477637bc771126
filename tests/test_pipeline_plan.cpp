// Plans and layouts: what resolve fills in, what check refuses and with which words, offsets that
// do not overlap and do not overflow, signals that only grow.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <vector>

#include "moxie/core/error.h"
#include "moxie/pipeline/cuda_layout.h"
#include "moxie/pipeline/plan.h"

namespace moxie::pipeline {
namespace {

Problem legal() {
  return {.num_ranks = 4,
          .max_tokens = 512,
          .hidden = 1024,
          .intermediate = 512,
          .num_experts = 16,
          .top_k = 4};
}

std::string sentence(const Problem& p, Plan plan) {
  try {
    check(p, resolve(p, plan));
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), ErrorCode::invalid_plan);
    return e.what();
  }
  return "";
}

TEST(PipelinePlan, DefaultIsAcceptedForEveryPreset) {
  for (const Preset& preset : presets())
    for (const std::int64_t ranks : {1, 3, 8, 64}) {
      const Problem p{.num_ranks = ranks,
                      .max_tokens = 1024,
                      .hidden = preset.hidden,
                      .intermediate = preset.intermediate,
                      .num_experts = preset.num_experts,
                      .top_k = preset.top_k};
      EXPECT_EQ(sentence(p, {}), "") << preset.name;
      EXPECT_EQ(sentence(p, {.mode = ExecMode::split}), "") << preset.name;
    }
}

TEST(PipelinePlan, RefusalsNameOptionValueRuleAndNearest) {
  const Problem p = legal();
  EXPECT_EQ(sentence(p, {.x_ring_blocks = 3}),
            "plan.x_ring_blocks is 3, must be between 8 and 67 (band_blocks + minibatch_blocks - 1 "
            "up to the capacity in blocks, "
            "or a wait could be for a later ticket); nearest legal value 8");
  EXPECT_NE(sentence(p, {.hidden_ring_blocks = 5})
                .find("slabs order holds the FC1 output of every block"),
            std::string::npos);
  EXPECT_NE(sentence(p, {.order = TaskOrder::lag, .hidden_ring_blocks = 23})
                .find("nearest legal value 24"),
            std::string::npos);
  EXPECT_EQ(sentence(p, {.order = TaskOrder::lag, .hidden_ring_blocks = 24}), "");
  EXPECT_NE(
      sentence(p, {.chunk_blocks = 8, .backward_ring_blocks = 15}).find("nearest legal value 16"),
      std::string::npos);
  EXPECT_NE(sentence(p, {.capacity_rows = 130}).find("nearest legal value 256"), std::string::npos);
  EXPECT_NE(sentence(p, {.num_slabs = 0}).find("plan.num_slabs is 0"), std::string::npos);
  EXPECT_EQ(sentence(p, {.comm_workers = 0}), "");
  EXPECT_NE(sentence(p, {.comm_workers = -1}).find("nearest legal value 0"), std::string::npos);
  EXPECT_NE(sentence(p, {.saved_rows = 1 << 30}).find("plan.saved_rows"), std::string::npos);
  EXPECT_NE(sentence(p, {.mode = ExecMode::split, .x_ring_blocks = 10}).find("split mode"),
            std::string::npos);
}

// A row's place in a pass has 32 bits on a GPU.
TEST(PipelinePlan, AtMost2To24BlocksPerPass) {
  Problem p = legal();
  p.num_ranks = 64;
  p.num_experts = 64;
  p.max_tokens = 1 << 23;
  p.top_k = 5;
  p.hidden = p.intermediate = 64;
  p.shared.intermediate = 64;
  const std::int64_t shared_blocks = num_blocks(p.max_tokens), limit = (1 << 24) - shared_blocks;
  EXPECT_EQ(sentence(p, {.capacity_rows = limit * kBlockRows}), "");
  EXPECT_EQ(sentence(p, {.capacity_rows = (limit + 1) * kBlockRows}),
            "plan.capacity_rows 2139095168 makes up to 16777217 blocks per pass, must be at most "
            "16777216 (a row's place in a pass has 32 bits); nearest legal capacity_rows "
            "2139095040");
}

// The bound is compared with the worst routing found by brute force.
TEST(PipelinePlan, WorstCaseBlocksIsReachedAndNeverExceeded) {
  for (std::int64_t experts = 1; experts <= 4; ++experts) {
    Problem p = legal();
    p.num_ranks = 1;
    p.num_experts = experts;
    p.top_k = 1;
    for (const std::int64_t tokens : {1, 2, 3, 127, 128, 129, 130, 257, 400}) {
      p.max_tokens = tokens;
      std::int64_t worst = 0;
      std::vector<std::int64_t> rows(static_cast<std::size_t>(experts), 0);
      // All ways to give all tokens to experts, up to order: first expert gets the most.
      std::function<void(std::size_t, std::int64_t)> split = [&](std::size_t e, std::int64_t left) {
        if (e + 1 == rows.size()) {
          rows[e] = left;
          std::int64_t blocks = 0;
          for (const std::int64_t n : rows) blocks += num_blocks(n);
          worst = std::max(worst, blocks);
          return;
        }
        const std::int64_t limit = e == 0 ? left : std::min<std::int64_t>(left, 2);
        for (std::int64_t n = 0; n <= limit; ++n) {
          rows[e] = n;
          split(e + 1, left - n);
        }
      };
      split(0, tokens);
      EXPECT_EQ(worst_case_blocks(p), worst) << experts << " experts, " << tokens << " tokens";
    }
  }
}

// The layers of bench/scenarios/h200x2-backward.json whose memory is held against a baseline.
struct MeasuredLayer {
  Problem problem;
  std::int64_t nccl_torch_bytes;  // bench/results/h200x2-backward.json
};
std::vector<MeasuredLayer> measured_layers() {
  const auto layer = [](std::int64_t hidden, std::int64_t intermediate, std::int64_t experts,
                        std::int64_t tokens, std::int64_t bytes) {
    return MeasuredLayer{{.num_ranks = 2,
                          .max_tokens = tokens,
                          .hidden = hidden,
                          .intermediate = intermediate,
                          .num_experts = 2 * experts,
                          .top_k = 8},
                         bytes};
  };
  return {layer(7168, 2048, 6, 8192, 7'955'713'536), layer(2048, 768, 64, 16384, 4'442'430'976)};
}

std::int64_t bytes_with_context(const Problem& p, const Plan& plan) {
  return heap_layout(p).num_bytes + workspace_layout(p, plan).num_bytes +
         context_bytes(p, plan).total();
}

TEST(PipelinePlan, ChosenMemoryIsThatOfTheExpectedRowsNotOfTheWorstCase) {
  for (const MeasuredLayer& layer : measured_layers()) {
    const Problem& p = layer.problem;
    const Plan plan = resolve(p, {});
    EXPECT_LE(bytes_with_context(p, plan), layer.nccl_torch_bytes * 6 / 10);
    EXPECT_EQ(plan.capacity_rows, worst_case_blocks(p) * kBlockRows);  // no routing fails
    // z of what routers make of equal chances.
    EXPECT_GE(plan.saved_rows, p.max_tokens * p.top_k * 104 / 100);
    EXPECT_GE(plan.backward_ring_blocks, expected_blocks(p) * 7 / 8);
    // A slot more would not lie in the forward's bytes, or there are as many as wanted.
    Plan more = plan;
    more.backward_ring_blocks += 3;
    EXPECT_GT(workspace_layout(p, more).num_bytes, workspace_layout(p, plan).num_bytes);
    // Asked for, all rows have memory.
    Plan all = {.backward_ring_blocks = plan.capacity_rows / kBlockRows,
                .saved_rows = plan.capacity_rows};
    EXPECT_GT(bytes_with_context(p, resolve(p, all)), layer.nccl_torch_bytes * 9 / 10);
  }
}

// An expert in two chunks has its sums put aside and loaded again. Layers of bench/scenarios on one
// and two ranks; of mixtral an expert has 32 blocks, of a ring of 128.
TEST(PipelinePlan, AChunkHoldsTheWidestExpertOfAFairRouting) {
  const auto layer = [](std::int64_t hidden, std::int64_t intermediate, std::int64_t experts,
                        std::int64_t top_k, std::int64_t tokens) {
    return Problem{.num_ranks = 1,
                   .max_tokens = tokens,
                   .hidden = hidden,
                   .intermediate = intermediate,
                   .num_experts = experts,
                   .top_k = top_k};
  };
  for (Problem p : {layer(7168, 2048, 12, 8, 8192), layer(7168, 2048, 16, 8, 8192),
                    layer(2048, 768, 128, 8, 16384), layer(4096, 14336, 8, 2, 8192),
                    layer(4096, 14336, 4, 2, 8192), layer(2880, 2880, 128, 4, 16384)}) {
    for (const std::int64_t ranks : {1, 2}) {
      p.num_ranks = ranks;
      const Plan plan = resolve(p, {});
      const std::int64_t rows = ranks * p.max_tokens * p.top_k / p.num_experts;
      EXPECT_GE(plan.chunk_blocks, num_blocks(rows + rows / 10))
          << p.num_experts << " experts, " << ranks << " ranks";
      EXPECT_NO_THROW(check(p, plan));
    }
  }
  // What does not fit is cut: a ring of 16 has two chunks of 8 in flight.
  const Problem wide = layer(4096, 14336, 8, 2, 8192);
  EXPECT_EQ(resolve(wide, {.lag_chunks = 1, .backward_ring_blocks = 16}).chunk_blocks, 8);
}

TEST(PipelinePlan, SmallPassesAndSplitModeKeepEveryRow) {
  const Problem p = legal();
  const Plan plan = resolve(p, {});
  EXPECT_EQ(plan.backward_ring_blocks, worst_case_blocks(p));
  EXPECT_EQ(plan.chunk_blocks, worst_case_blocks(p));
  EXPECT_EQ(plan.saved_rows, plan.capacity_rows);
  for (const MeasuredLayer& layer : measured_layers()) {
    EXPECT_EQ(resolve(layer.problem, {.mode = ExecMode::split}).backward_ring_blocks,
              worst_case_blocks(layer.problem));
    EXPECT_EQ(resolve(layer.problem, {.save = SavePolicy::z_and_x}).saved_rows,
              worst_case_blocks(layer.problem) * kBlockRows);
    EXPECT_EQ(resolve(layer.problem, {.save = SavePolicy::none, .saved_rows = 256}).saved_rows, 0);
  }
}

// Whatever else is asked for: what is chosen beside it is legal.
TEST(PipelinePlan, DgradRunsAheadByEnoughTilesOfSmallExperts) {
  const auto lag = [](std::int64_t ranks, std::int64_t hidden, std::int64_t intermediate,
                      std::int64_t experts, Plan plan = {}) {
    const Problem p{.num_ranks = ranks,
                    .max_tokens = 16384,
                    .hidden = hidden,
                    .intermediate = intermediate,
                    .num_experts = experts,
                    .top_k = 8};
    const Plan full = resolve(p, plan);
    check(p, full);
    return full.lag_chunks;
  };
  EXPECT_EQ(lag(2, 7168, 2048, 12), 1);  // thousands of tiles in a chunk
  EXPECT_EQ(lag(2, 2048, 768, 128), 2);  // 320
  EXPECT_EQ(lag(1, 2048, 768, 128), 3);  // 232
  EXPECT_EQ(lag(1, 64, 64, 1024), 4);    // 5: more chunks are not worth their slots
  EXPECT_EQ(lag(2, 7168, 2048, 12, {.chunk_blocks = 1}), 1);
  EXPECT_EQ(lag(1, 64, 64, 1024, {.lag_chunks = 2}), 2);                                // as told
  EXPECT_EQ(lag(1, 64, 64, 1024, {.chunk_blocks = 4, .backward_ring_blocks = 12}), 2);  // as fits
  EXPECT_EQ(lag(1, 64, 64, 1024, {.chunk_blocks = 4, .backward_ring_blocks = 8}), 1);
}

TEST(PipelinePlan, ChosenRingAndChunkAreLegal) {
  Problem p = measured_layers()[0].problem;
  for (const std::int64_t shared : {0, 2048}) {
    p.shared.intermediate = shared;
    for (const std::int32_t chunk : {0, 1, 7, 300, 5000})
      for (const std::int32_t lag : {1, 2, 9, 1000})
        for (const std::int32_t minibatch : {1, 16, 400})
          for (const std::int64_t ring : {0, 128, 650})
            for (const std::int64_t capacity : {0, 128, 70'400}) {
              const Plan plan{.minibatch_blocks = minibatch,
                              .capacity_rows = capacity,
                              .chunk_blocks = chunk,
                              .lag_chunks = lag,
                              .backward_ring_blocks = ring};
              const std::string words = sentence(p, plan);
              // Given rings may be too small for the rest, or larger than the capacity.
              EXPECT_TRUE(words.empty() ||
                          (ring != 0 && words.find("backward_ring_blocks") != std::string::npos) ||
                          words.find("x_ring_blocks") != std::string::npos)
                  << words;
              if (ring == 0) EXPECT_EQ(words, "") << to_string(plan);
            }
  }
}

void expect_disjoint(std::vector<Region> regions, std::int64_t end) {
  std::erase_if(regions, [](const Region& r) { return r.num_bytes == 0; });
  std::sort(regions.begin(), regions.end(),
            [](const Region& a, const Region& b) { return a.offset < b.offset; });
  for (std::size_t i = 0; i < regions.size(); ++i) {
    EXPECT_EQ(regions[i].offset % kRegionAlign, 0);
    EXPECT_LE(regions[i].offset + regions[i].num_bytes,
              i + 1 < regions.size() ? regions[i + 1].offset : end);
  }
}

TEST(PipelineLayout, RegionsAreAlignedAndDisjoint) {
  Problem p = legal();
  p.shared = {256, true};
  const Plan plan = resolve(p, {.order = TaskOrder::lag,
                                .dispatch = DispatchMode::push,
                                .combine = CombineMode::comm_workers,
                                .x_ring_blocks = 20,
                                .hidden_ring_blocks = 30,
                                .backward_ring_blocks = 25});
  const HeapLayout h = heap_layout(p);
  expect_disjoint(
      {h.epoch, h.stopped, h.inputs_ready, h.x_staged, h.agreement, h.returns_done, h.x_in, h.dy_in,
       h.routes_sorted, h.weights_sorted, h.route_begin, h.num_tokens, h.returns, h.d_weights},
      h.num_bytes);
  const WorkspaceLayout w = workspace_layout(p, plan);
  std::vector<Region> tables = {w.row_prefix,   w.source_begin,  w.expert_block, w.chunk_block,
                                w.chunk_expert, w.chunk_after,   w.step_ticket,  w.ids,
                                w.origins,      w.shared_weight, w.pass_count,   w.counters,
                                w.shared_out};
  const std::vector<Region> push = {w.push_first_row, w.push_expert_block, w.push_shared_blocks,
                                    w.push_unit_begin};
  for (const Region& r : push) EXPECT_GT(r.num_bytes, 0);
  EXPECT_GT(w.y.num_bytes, 0);
  for (const Region& r : push) tables.push_back(r);
  std::vector<Region> forward, backward;
  for (const Region& r : tables) {
    forward.push_back(r);
    backward.push_back(r);
  }
  for (const Region& r : {w.x_ring, w.hidden_ring, w.shared_hidden, w.y}) forward.push_back(r);
  for (const Region& r :
       {w.dy_ring, w.xb_ring, w.dgate_ring, w.dup_ring, w.wa_ring, w.dw_partial, w.wgrad_partial}) {
    backward.push_back(r);
  }
  expect_disjoint(forward, w.num_bytes);
  expect_disjoint(backward, w.num_bytes);
}

// One tensor map of the GPU reaches all rings of a kind.
TEST(PipelineLayout, RingsOfTheBackwardLieBehindEachOther) {
  const auto follows = [](const Region& first, const Region& second) {
    return second.offset == first.offset + first.num_bytes;
  };
  for (const std::int64_t ring_blocks : {0, 21}) {
    Problem p = legal();
    p.shared = {p.intermediate + 64, true};
    const WorkspaceLayout w = workspace_layout(
        p, resolve(p, {.backward_ring_blocks = ring_blocks, .save = SavePolicy::none}));
    EXPECT_TRUE(follows(w.dy_ring, w.xb_ring));
    EXPECT_TRUE(follows(w.dgate_ring, w.dup_ring));
    EXPECT_TRUE(follows(w.dup_ring, w.wa_ring));
  }
}

TEST(PipelineLayout, UnusedOptionsTakeNoMemory) {
  const Problem p = legal();
  const WorkspaceLayout w = workspace_layout(p, resolve(p, {}));
  for (const Region& r :
       {w.push_first_row, w.push_expert_block, w.push_shared_blocks, w.push_unit_begin, w.y})
    EXPECT_EQ(r.num_bytes, 0);
  EXPECT_EQ(extents(p, resolve(p, {})).y_counters, 0);
}

TEST(PipelineLayout, PoisonSparesWhatLivesOn) {
  Problem p = legal();
  p.shared = {256, true};
  const HeapLayout h = heap_layout(p);
  const WorkspaceLayout w = workspace_layout(p, resolve(p, {}));
  const auto hits = [](const std::vector<Region>& list, const Region& r) {
    return std::ranges::any_of(list, [&](const Region& one) {
      return one.offset < r.offset + r.num_bytes && r.offset < one.offset + one.num_bytes;
    });
  };
  for (const bool in_place : {false, true}) {
    const auto heap = poisoned_heap(h, in_place);
    for (const Region& r : {h.epoch, h.stopped, h.inputs_ready, h.agreement, h.returns_done})
      EXPECT_FALSE(hits(heap, r));
    EXPECT_EQ(hits(heap, h.x_in), !in_place);
    for (const Region& r : {h.dy_in, h.routes_sorted, h.route_begin, h.returns, h.d_weights})
      EXPECT_TRUE(hits(heap, r));
  }
  const auto workspace = poisoned_workspace(w);
  EXPECT_FALSE(hits(workspace, w.pass_count));
  EXPECT_FALSE(hits(workspace, w.counters));
  for (const Region& r : {w.row_prefix, w.origins, w.shared_out, w.x_ring, w.hidden_ring})
    EXPECT_TRUE(hits(workspace, r));
}

// Rows times H just over 2^31: virtual sizes, nothing is allocated.
TEST(PipelineLayout, OffsetsAre64Bit) {
  Problem p = legal();
  p.max_tokens = 200'000;
  p.num_ranks = 8;
  p.hidden = 7168;
  p.top_k = 8;
  const HeapLayout h = heap_layout(p);
  EXPECT_EQ(h.returns.num_bytes, 200'000ll * 8 * 7168 * 2);
  EXPECT_GT(h.returns.offset, 1ll << 32);
  const Plan plan = resolve(p, {});
  EXPECT_NO_THROW(check(p, plan));
  const WorkspaceLayout w = workspace_layout(p, plan);
  EXPECT_EQ(w.x_ring.num_bytes, plan.x_ring_blocks * 128 * 7168 * 2);
  EXPECT_GT(w.x_ring.num_bytes, 1ll << 37);
}

// A layer with every buffer, and plans that use them.
Problem everything() {
  Problem p = legal();
  p.max_tokens = 500;
  p.shared.intermediate = 192;
  p.expert_bias = true;
  return p;
}
std::vector<Plan> plans_of_all_buffers(const Problem& p) {
  std::vector<Plan> plans;
  for (const Plan& plan :
       {Plan{}, Plan{.combine = CombineMode::comm_workers}, Plan{.dispatch = DispatchMode::push},
        Plan{.order = TaskOrder::lag, .chunk_blocks = 2}, Plan{.save = SavePolicy::z_and_x}})
    plans.push_back(resolve(p, plan));
  return plans;
}

// The lines are the whole allocation but for what aligning a region leaves empty; the last one is
// the allocation.
void expect_adds_up(const std::vector<NamedBytes>& table, std::int64_t num_bytes) {
  std::int64_t both = 0, forward = 0, backward = 0;
  for (const NamedBytes& b : table) {
    const std::string_view name = b.name;
    EXPECT_GT(b.num_bytes, 0) << name;
    if (&b == &table.back()) continue;
    (name.starts_with("forward.")    ? forward
     : name.starts_with("backward.") ? backward
                                     : both) += b.num_bytes;
  }
  EXPECT_STREQ(table.back().name, "total");
  EXPECT_EQ(table.back().num_bytes, num_bytes);
  const std::int64_t sum = both + std::max(forward, backward);
  EXPECT_LE(sum, num_bytes);
  EXPECT_GT(sum + 50 * kRegionAlign, num_bytes);
}

TEST(PipelineLayout, MemoryTableAddsUp) {
  const Problem p = everything();
  for (const Plan& plan : plans_of_all_buffers(p))
    expect_adds_up(buffer_bytes(p, plan),
                   heap_layout(p).num_bytes + workspace_layout(p, plan).num_bytes);
}

TEST(PipelineLayout, MemoryTableOfAGpuAddsUp) {
  for (const std::int64_t ranks : {1, 4}) {
    Problem p = everything();
    p.num_ranks = ranks;
    for (const Plan& plan : plans_of_all_buffers(p))
      expect_adds_up(cuda_buffer_bytes(p, plan),
                     heap_layout(p).num_bytes + cuda_workspace_layout(p, plan).num_bytes);
  }
}

// Written out: 4 ranks, 500 tokens, 16 experts, K = 4, whole blocks of 128 rows.
TEST(PipelineLayout, WhatOnlyTheGpuKeeps) {
  const Problem p = everything();
  const Plan plan = resolve(p, {});
  ASSERT_EQ(plan.capacity_rows, 4 * 500 * 4 / 128 * 128 + 4 * 128);  // 62 whole blocks and 4 begun
  const CudaWorkspaceLayout l = cuda_workspace_layout(p, plan);
  EXPECT_EQ(l.sort_counts.num_bytes, 64 * 16 * 4);
  EXPECT_EQ(l.result.num_bytes, 4 * 4);
  EXPECT_EQ(l.pulled.num_bytes, 4 * 500 * 8);
  EXPECT_EQ(l.row_places.num_bytes, plan.capacity_rows * 8);
  EXPECT_EQ(l.words.num_bytes, 2 * 3 * 4);
  const std::int64_t chunks = 66 + 4 + 4 + 1;  // routed blocks, shared ones, experts, one more
  EXPECT_EQ(l.step_pair.num_bytes, (2 * chunks + plan.lag_chunks + 2) * 8);
  EXPECT_EQ(l.dy_bias.num_bytes, plan.capacity_rows * 4);
  std::int64_t end = workspace_layout(p, plan).num_bytes;
  for (const Region& region :
       {l.sort_counts, l.result, l.pulled, l.row_places, l.words, l.step_pair, l.dy_bias}) {
    EXPECT_EQ(region.offset, align_up(end, kRegionAlign));
    end = region.offset + region.num_bytes;
  }
  EXPECT_EQ(l.num_bytes, align_up(end, kRegionAlign));
  Problem alone = p;
  alone.num_ranks = 1;
  alone.expert_bias = false;
  const CudaWorkspaceLayout one = cuda_workspace_layout(alone, resolve(alone, {}));
  EXPECT_EQ(one.pulled.num_bytes + one.dy_bias.num_bytes, 0);
}

// FC1 gathers rows where each token lies once: not where rows are pushed, kept, pulled again, or
// loaded by many tiles.
TEST(PipelineLayout, RowsAreGatheredWhereNoTokenComesTwice) {
  const Problem p = everything();
  const auto gathers = [](const Problem& problem, const Plan& plan) {
    return gathers_rows(problem, resolve(problem, plan));
  };
  EXPECT_TRUE(gathers(p, {}));
  EXPECT_FALSE(gathers(p, {.dispatch = DispatchMode::push}));
  EXPECT_FALSE(gathers(p, {.save = SavePolicy::z_and_x}));
  EXPECT_FALSE(gathers(p, {.x_ring_blocks = 20}));  // smaller than the pass
  Problem broad = p;
  broad.intermediate = 16 * 128;
  EXPECT_TRUE(gathers(broad, {}));
  broad.intermediate += 8;  // loaded 17 times
  EXPECT_FALSE(gathers(broad, {}));
  Problem alone = p;
  alone.num_ranks = 1;
  EXPECT_TRUE(gathers(alone, {.x_ring_blocks = 20}));  // its own tokens stay where they are
  Problem wide = alone;
  wide.max_tokens = 1 << 20;
  wide.hidden = 1 << 15;  // 2^32 chunks of 16 bytes
  EXPECT_FALSE(gathers(wide, {}));
}

TEST(PipelineSignals, WordsOnlyGrow) {
  std::uint64_t last = 0;
  for (std::uint64_t epoch = 1; epoch < 100; ++epoch)
    for (std::uint32_t payload = 0; payload < 3; ++payload) {
      const std::uint64_t word = make_signal(epoch, payload);
      EXPECT_GT(word, last);
      EXPECT_TRUE(reached(word, make_signal(epoch)));
      EXPECT_FALSE(reached(word, make_signal(epoch + 1)));
      EXPECT_EQ(epoch_of(word), epoch);
      EXPECT_EQ(payload_of(word), payload);
      last = word;
    }
  EXPECT_NE(counter_bank(7), counter_bank(8));
}

}  // namespace
}  // namespace moxie::pipeline
