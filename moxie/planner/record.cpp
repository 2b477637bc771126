#include "moxie/planner/record.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>

namespace moxie::planner {
namespace {

// What no measurement on one machine shows (tensor rates, surroundings), and what has no default
// should the driver not say it.
constexpr std::array kTaken = {Field::bf16_flops_per_sm_clock,
                               Field::fp8_flops_per_sm_clock,
                               Field::packet_payload_bytes,
                               Field::domain_ranks,
                               Field::link_raw_gbps,
                               Field::hbm_peak_gbps,
                               Field::hbm_gb,
                               Field::num_sms,
                               Field::clock_peak_mhz};

double rounded(double value) {  // four digits: more are noise
  if (value == 0 || !std::isfinite(value)) return value;
  const double unit = std::pow(10, std::floor(std::log10(std::abs(value))) - 3);
  return std::stod(fmt::format("{:.6g}", std::round(value / unit) * unit));
}

}  // namespace

double packet_overhead_bytes(double raw_gbps, double payload_gbps, double payload_bytes,
                             double other_bytes) {
  const double bytes = raw_gbps * payload_bytes / payload_gbps - payload_bytes - other_bytes;
  return std::clamp(bytes, rule(Field::pull_reverse_bytes).min,
                    rule(Field::pull_reverse_bytes).max);
}

std::string record_json(const Measurements& measured, const std::string& like) {
  std::optional<DeviceRecord> shipped;
  if (!like.empty()) shipped = find_device(like);
  OrderedJson constants;
  for (std::size_t i = 0; i < kNumFields; ++i) {
    const auto field = static_cast<Field>(i);
    const auto found = measured.constants.find(field);
    OrderedJson constant = {{"value", nullptr}, {"source", "not measured"}};
    if (found != measured.constants.end()) {
      constant = {{"value", rounded(found->second.value)}, {"source", found->second.source}};
    } else if (shipped && shipped->constants[i].known &&
               std::find(kTaken.begin(), kTaken.end(), field) != kTaken.end()) {
      constant = {{"value", shipped->constants[i].value},
                  {"source", fmt::format("taken from the shipped record {}: {}", like,
                                         shipped->constants[i].source)}};
    }
    constants[rule(field).name] = constant;
  }
  OrderedJson rows = OrderedJson::array();
  for (const GemmPoint& p : measured.gemm) {
    rows.push_back({{"tile_rows", p.tile_rows},
                    {"tile_cols", p.tile_cols},
                    {"k", p.k},
                    {"tflops", rounded(p.tflops)},
                    {"clock_mhz", rounded(p.clock_mhz)},
                    {"source", p.source}});
  }
  const OrderedJson json = {{"name", measured.name},
                            {"title", measured.title},
                            {"constants", constants},
                            {"gemm_measured", rows},
                            {"also_measured", measured.also}};
  const std::string text = json.dump(1, ' ', false, OrderedJson::error_handler_t::replace) + "\n";
  parse_device(text, "the measured record");
  return text;
}

}  // namespace moxie::planner
