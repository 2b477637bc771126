// Device records: what one GPU and the fabric around it can do, each number with its source. A
// record is a JSON file (moxie/planner/*.json, format in docs/planner.md); the shipped ones
// are embedded at build time, a user can hand in a path. A number nobody measured or published is
// null; `machine` fills the gaps by stated rules and lists what it assumed.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "moxie/core/dtype.h"

namespace moxie::planner {

struct Constant {
  double value = 0;
  bool known = false;
  std::string source;
};

// One measured product: a point of "GEMM efficiency by tile and K".
struct GemmPoint {
  std::int64_t tile_rows = 0, tile_cols = 0, k = 0;
  double tflops = 0, clock_mhz = 0;
  std::string source;
};

struct DeviceRecord {
  std::string name, title;
  std::vector<Constant> constants;  // index = Field
  std::vector<GemmPoint> gemm;
};

enum class Field : std::int32_t {
  num_sms,
  clock_peak_mhz,
  clock_burst_mhz,      // under GEMM load, first ~25 ms
  clock_sustained_mhz,  // under GEMM load, thermally settled
  bf16_flops_per_sm_clock,
  fp8_flops_per_sm_clock,
  tile_overhead_cycles,  // per 128 x 256 tile: prologue, epilogue and ticket not hidden by products
  fused_tile_cycles,     // the same of FC1, FC2 and dX in one kernel, beside rows that come and go
  stored_tile_cycles,    // ... and of tiles whose results others wait for: dgrad, z made again
  tdp_w,
  // What each GB that a kernel reads or writes in memory, more than products alone do
  // (kProductsGbPerTflop), takes from power-limited products.
  moved_ms_per_gb,
  hbm_gb,
  hbm_peak_gbps,
  hbm_gbps,  // reached by streaming kernels
  l2_mb,
  link_raw_gbps,  // per GPU and direction, all links
  packet_payload_bytes,
  push_forward_bytes,  // on the wire beside one packet's payload, in its direction ...
  push_reverse_bytes,  // ... and against it (acknowledgement)
  pull_forward_bytes,
  pull_reverse_bytes,  // read request
  remote_load_us,      // one load.acquire from a peer
  local_load_us,
  signal_us,        // store.release at a peer until its load.acquire sees it
  sm_pull_gbps,     // one SM that only copies
  sm_push_gbps,     // likewise
  sm_beside_gbps,   // one communication CTA beside a running GEMM
  spare_warp_gbps,  // the two spare warps of one GEMM CTA, dispatching
  sm_merge_gbps,    // HBM bytes one SM moves when merging with all its warps
  spare_merge_gbps,
  launch_us,         // one kernel launch in a stream of launches
  grid_sync_us,      // all CTAs of a GPU meet
  schedule_base_us,  // sort, handshake, tables; plus schedule_ns_per_route * T * K
  schedule_ns_per_route,
  domain_ranks,  // GPUs that reach each other by loads and stores
  network_gbps,  // per GPU and direction, between domains
  network_us,    // one message between domains
};
inline constexpr std::size_t kNumFields = 37;

struct FieldRule {
  const char* name;
  const char* unit;
  double min, max;
  bool required;
  const char* what;
};
const FieldRule& rule(Field field);

// Throws Error(invalid_argument) that names the record, the field, the value and the nearest legal
// one. `where` names the file in sentences.
DeviceRecord parse_device(std::string_view json, const std::string& where);
// A shipped record by name ("h200"), or the record in a file when `name` has a '/' or ends in
// .json.
DeviceRecord find_device(const std::string& name);
std::vector<std::string> device_names();  // shipped ones
std::string device_json(const std::string& name);

enum class Load : std::int32_t { burst, sustained };
const char* name(Load load);

// All numbers of a record, gaps filled. `assumed` says how, one sentence each.
struct Machine {
  std::string device;
  std::vector<double> values;  // index = Field
  double clock_mhz = 0;        // under the load asked for
  std::vector<std::string> assumed;
  double operator[](Field f) const { return values[static_cast<std::size_t>(f)]; }
  std::int64_t num_sms() const { return static_cast<std::int64_t>((*this)[Field::num_sms]); }
  std::int64_t domain_ranks() const {
    return static_cast<std::int64_t>((*this)[Field::domain_ranks]);
  }
};
Machine machine(const DeviceRecord& record, Load load = Load::burst);

// What one payload byte costs on a link, in its own direction and against it.
struct WireBytes {
  double forward = 1, reverse = 0;
};
WireBytes pull_wire(const Machine& m);
WireBytes push_wire(const Machine& m);

}  // namespace moxie::planner
