// Filling the gaps of a device record. Every rule is one line here and one sentence in
// Machine::assumed: a prediction that rests on an assumption says so. The reference is the H200
// record, the only one whose constants were measured together.
#include <fmt/format.h>

#include <functional>

#include "moxie/planner/device.h"

namespace moxie::planner {
namespace {

struct Gap {
  Field field;
  std::function<double(const Machine&)> value;
  const char* rule;
};

// In order: a rule may use what an earlier one filled in.
const std::vector<Gap>& gaps() {
  using M = const Machine&;
  const auto constant = [](double v) { return [v](M) { return v; }; };
  static const std::vector<Gap> kGaps = {
      {Field::tdp_w, constant(700), "700 W"},
      {Field::clock_burst_mhz, [](M m) { return 0.793 * m[Field::clock_peak_mhz]; },
       "the share of the peak clock that H200 keeps (1571 of 1980)"},
      {Field::clock_sustained_mhz, [](M m) { return 0.846 * m[Field::clock_burst_mhz]; },
       "the share of the burst clock that H200 keeps (1329 of 1571)"},
      {Field::fp8_flops_per_sm_clock, [](M m) { return 2 * m[Field::bf16_flops_per_sm_clock]; },
       "twice the BF16 rate"},
      {Field::tile_overhead_cycles, constant(2500), "that of H200"},
      {Field::fused_tile_cycles, constant(4000), "that of H200"},
      {Field::stored_tile_cycles, constant(19000), "that of H200"},
      {Field::moved_ms_per_gb, [](M m) { return 0.10 * 700 / m[Field::tdp_w]; },
       "the joules per byte of H200 under this power limit"},
      {Field::hbm_gbps, [](M m) { return 0.81 * m[Field::hbm_peak_gbps]; },
       "the share of the peak that H200 reaches (3.9 of 4.8 TB/s)"},
      {Field::l2_mb, constant(50), "50 MB"},
      {Field::packet_payload_bytes, constant(128), "that of H200"},
      {Field::push_forward_bytes, constant(16), "that of H200"},
      {Field::push_reverse_bytes, constant(16), "that of H200"},
      {Field::pull_forward_bytes, constant(16), "that of H200"},
      {Field::pull_reverse_bytes, constant(28), "that of H200"},
      {Field::remote_load_us, constant(0.84), "that of H200"},
      {Field::local_load_us, constant(0.15), "that of H200"},
      {Field::signal_us, constant(1.35), "that of H200"},
      {Field::sm_pull_gbps, [](M m) { return 50 * m[Field::link_raw_gbps] / 450; },
       "that of H200, scaled with the link"},
      {Field::sm_push_gbps, [](M m) { return 46 * m[Field::link_raw_gbps] / 450; },
       "that of H200, scaled with the link"},
      {Field::sm_beside_gbps, [](M m) { return 36 * m[Field::link_raw_gbps] / 450; },
       "that of H200, scaled with the link"},
      {Field::spare_warp_gbps, constant(6.5), "that of H200"},
      {Field::sm_merge_gbps, [](M m) { return m[Field::hbm_gbps] / m[Field::num_sms]; },
       "an equal share of the memory rate"},
      {Field::spare_merge_gbps, [](M m) { return 0.57 * m[Field::sm_merge_gbps]; },
       "the share of a whole SM that H200's spare warps reach"},
      {Field::launch_us, constant(4), "4 us, usual for launches in a stream"},
      {Field::grid_sync_us, constant(2), "2 us"},
      {Field::schedule_base_us, constant(20), "20 us, within the bound of 40 us at 65,536 routes"},
      {Field::schedule_ns_per_route, constant(0.3),
       "0.3 ns, within the bound of 40 us at 65,536 routes"},
      {Field::network_gbps, constant(50), "one 400 Gb/s port per GPU"},
      {Field::network_us, constant(5), "5 us"},
  };
  return kGaps;
}

}  // namespace

Machine machine(const DeviceRecord& record, Load load) {
  Machine m;
  m.device = record.name;
  m.values.resize(kNumFields);
  for (std::size_t i = 0; i < kNumFields; ++i) m.values[i] = record.constants[i].value;
  for (const Gap& gap : gaps()) {
    const auto i = static_cast<std::size_t>(gap.field);
    if (record.constants[i].known) continue;
    m.values[i] = gap.value(m);
    m.assumed.push_back(fmt::format("{} {:.4g} {}: {}", rule(gap.field).name, m.values[i],
                                    rule(gap.field).unit, gap.rule));
  }
  m.clock_mhz = m[load == Load::burst ? Field::clock_burst_mhz : Field::clock_sustained_mhz];
  return m;
}

}  // namespace moxie::planner
