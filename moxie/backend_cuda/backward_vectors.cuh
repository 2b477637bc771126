// Vector gradients: of the biases (column sums of dgate, of dup, of w dY) and of the shared
// expert's output gate (of the logit's gradient times x), FP32, summed in row order. A warp of the
// dispatching ones takes 256 columns of a chunk at a time; the tensor cores have nothing to do with
// it. CPU twin: vector_grads() in roles_compute.h.
#pragma once

#include "moxie/backend_cuda/backward_state.cuh"
#include "moxie/merge/merge_cuda.cuh"

namespace moxie::backend_cuda {

// One unit: the sum over the rows of a chunk of weight(row) * values[row, column], for 8 columns
// per lane.
struct VectorStrip {
  int32_t chunk, expert;  // pipeline::kSharedExpert
  int32_t kind;           // 0: d(gate bias), 1: d(up bias), 2: d(down bias); shared: output gate
  int32_t columns;        // of the vector
  int32_t column;         // this lane's first; past the end: nothing to do
  float* out;             // the vector
};

__device__ __forceinline__ VectorStrip vector_strip(const BackwardCommon& common,
                                                    const BackwardRank& rank,
                                                    const BackwardState& state, int32_t unit) {
  const VectorUnits& v = state.vectors;
  const auto hidden = static_cast<int32_t>(common.problem.hidden),
             width = static_cast<int32_t>(common.problem.intermediate);
  const int32_t shared_units = v.shared_chunks * v.per_shared_chunk;
  VectorStrip s{};
  int32_t strip = 0;
  if (unit < shared_units) {
    s.chunk = unit / v.per_shared_chunk;
    strip = unit % v.per_shared_chunk;
    s.expert = pipeline::kSharedExpert;
    s.columns = hidden;
    s.out = rank.d_output_gate;
  } else {
    s.chunk = v.shared_chunks + (unit - shared_units) / v.per_chunk;
    strip = (unit - shared_units) % v.per_chunk;
    s.expert = state.stream.chunks.chunk_expert[s.chunk];
    s.kind = min(strip / v.gate_strips, 2);
    strip -= s.kind * v.gate_strips;
    s.columns = s.kind == 2 ? hidden : width;
    float* out[3] = {rank.d_gate_bias, rank.d_up_bias, rank.d_down_bias};
    s.out = (s.kind == 0 ? out[0] : s.kind == 1 ? out[1] : out[2]) + int64_t{s.expert} * s.columns;
  }
  s.column = strip * 256 + static_cast<int32_t>(threadIdx.x % 32) * 8;
  return s;
}

// Rows of one block, added in order.
__device__ __forceinline__ void add_rows(const BackwardCommon& common, const BackwardRank& rank,
                                         const BackwardState& state, const VectorStrip& s,
                                         BlockId b, float (&sum)[8]) {
  constexpr int kInFlight = 8;
  const bool shared = s.expert == pipeline::kSharedExpert;
  const auto num_rows = static_cast<int32_t>(shared ? state.table.rows(b)
                                                    : state.table.rows(b, LocalExpertId{s.expert}));
  const int64_t slot_row = int64_t{state.slot_of(b.v)} * pipeline::kBlockRows;
  const bf16* values = nullptr;
  int64_t stride = common.problem.hidden;
  if (shared) {
    values = rank.x + b.v * pipeline::kBlockRows * stride;
  } else if (s.kind == 2) {
    values = at<bf16>(rank, common.workspace.dy_ring) + slot_row * stride;
  } else {
    stride = common.ring_width;
    values = at<bf16>(rank, common.workspace.dgate_ring) +
             (s.kind * common.ring_rows + slot_row) * stride;
  }
  const pipeline::RowOrigin* origins = at<pipeline::RowOrigin>(rank, common.workspace.origins) +
                                       state.table.routed_idx(b) * pipeline::kBlockRows;
  const auto weight = [&](int32_t row) {
    if (shared) {
      return logit_grad(common, rank, state,
                        static_cast<int32_t>(b.v * pipeline::kBlockRows) + row);
    }
    return s.kind == 2 ? __ldcg(&origins[row].weight) : 1.0f;
  };
#pragma unroll 1
  for (int32_t base = 0; base < num_rows; base += kInFlight) {
    uint4 chunk[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      chunk[i] = {};  // else a predicated load keeps the old value alive through the loop: spills
      if (base + i < num_rows && s.column < s.columns) {
        chunk[i] = __ldcg(reinterpret_cast<const uint4*>(values + (base + i) * stride + s.column));
      }
    }
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      if (base + i >= num_rows) continue;
      float row[8] = {};
      merge::add_chunk(row, chunk[i]);
      const float w = weight(base + i);
#pragma unroll
      for (int c = 0; c < 8; ++c) sum[c] = fmaf(w, row[c], sum[c]);
    }
  }
}

// The whole warp: sums the units of chunks [0, end_chunk) that nobody has claimed, each when its
// chunk's dgrad tiles are done. False: gave up.
__device__ __forceinline__ bool sum_vectors(const BackwardCommon& common, const BackwardRank& rank,
                                            BackwardState& state, int64_t end_chunk) {
  const int32_t lane_idx = threadIdx.x % 32, num_units = state.vectors.before(end_chunk);
  if (num_units == 0) return true;
  const pipeline::BackwardStream& stream = state.stream;
  for (;;) {
    uint32_t unit = 0;
    if (lane_idx == 0) {
      unit = device::claim_below(state.counters + common.counters.combine_unit,
                                 static_cast<uint32_t>(num_units));
    }
    unit = __shfl_sync(~0u, unit, 0);
    if (unit >= static_cast<uint32_t>(num_units)) return true;
    delay_of(common)();
    const VectorStrip s = vector_strip(common, rank, state, static_cast<int32_t>(unit));
    const bool is_first = stream.chunks.first_of_expert(s.chunk);
    bool healthy = true;
    if (lane_idx == 0) {
      // Signalled by dgrad: every column tile of every block of the chunk is written.
      healthy = device::wait_counter(state.counters + common.counters.dgrad_done + s.chunk,
                                     static_cast<uint32_t>(stream.dgrad_tickets(s.chunk)),
                                     state.counter_limits, code(WaitFor::fc1_done), s.chunk);
      // Signalled by whoever trails the expert's chunk before: its part of the sum is written.
      if (healthy && !is_first) {
        healthy = device::wait_counter(state.counters + common.counters.trail_done + s.chunk - 1,
                                       state.trail_of(s.chunk - 1), state.counter_limits,
                                       code(WaitFor::wgrad_order), s.chunk - 1);
      }
    }
    if (!__all_sync(~0u, healthy)) return false;
    __syncwarp();  // what lane 0 acquired, to all
    const pipeline::Range blocks = stream.chunks.blocks(s.chunk);
    const bool zero = is_first && !common.accumulate;
    if (zero || blocks.size() > 0) {
      float sum[8] = {};
      float4* out = reinterpret_cast<float4*>(s.out + s.column);
      const bool writes = s.column < s.columns;
      if (!zero && writes) {
        const float4 low = __ldcg(out), high = __ldcg(out + 1);
        sum[0] = low.x, sum[1] = low.y, sum[2] = low.z, sum[3] = low.w;
        sum[4] = high.x, sum[5] = high.y, sum[6] = high.z, sum[7] = high.w;
      }
#pragma unroll 1
      for (int64_t b = blocks.begin; b < blocks.end; ++b)
        add_rows(common, rank, state, s, BlockId{static_cast<int32_t>(b)}, sum);
      if (writes) {
        out[0] = make_float4(sum[0], sum[1], sum[2], sum[3]);
        out[1] = make_float4(sum[4], sum[5], sum[6], sum[7]);
      }
    }
    __syncwarp();  // all lanes' parts, to lane 0
    if (lane_idx == 0 && state.counts_trail)
      device::add_release_gpu(state.counters + common.counters.trail_done + s.chunk, 1);
  }
}

}  // namespace moxie::backend_cuda
