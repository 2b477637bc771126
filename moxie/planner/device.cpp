// Reading, judging and completing device records.
#include "moxie/planner/device.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "moxie/core/error.h"
#include "moxie/core/problem.h"
#include "moxie/planner/embedded.h"

namespace moxie::planner {
namespace {

using Json = nlohmann::json;

constexpr std::array<FieldRule, kNumFields> kRules = {{
    {"num_sms", "SMs", 1, 1024, true, "streaming multiprocessors the driver shows"},
    {"clock_peak_mhz", "MHz", 200, 5000, true, "highest SM clock"},
    {"clock_burst_mhz", "MHz", 200, 5000, false, "SM clock of large GEMMs, first 25 ms"},
    {"clock_sustained_mhz", "MHz", 200, 5000, false, "SM clock of large GEMMs, settled"},
    {"bf16_flops_per_sm_clock", "FLOP", 64, 1 << 20, true, "dense BF16 tensor rate"},
    {"fp8_flops_per_sm_clock", "FLOP", 64, 1 << 20, false, "dense FP8 tensor rate"},
    {"tile_overhead_cycles", "cycles", 0, 100000, false, "per tile, beside its products"},
    {"fused_tile_cycles", "cycles", 0, 100000, false,
     "per tile of FC1, FC2 or dX, all in one kernel"},
    {"stored_tile_cycles", "cycles", 0, 100000, false, "per dgrad tile, or tile that remakes z"},
    {"tdp_w", "W", 10, 10000, false, "power limit"},
    {"moved_ms_per_gb", "ms/GB", 0, 100, false, "what memory traffic takes from products"},
    {"hbm_gb", "GB", 1, 10000, true, "memory"},
    {"hbm_peak_gbps", "GB/s", 10, 100000, true, "memory rate on paper"},
    {"hbm_gbps", "GB/s", 10, 100000, false, "memory rate reached"},
    {"l2_mb", "MB", 1, 10000, false, "L2 cache"},
    {"link_raw_gbps", "GB/s", 1, 10000, true, "links of one GPU, one direction"},
    {"packet_payload_bytes", "B", 16, 4096, false, "payload of one link packet"},
    {"push_forward_bytes", "B", 0, 256, false, "header beside a pushed packet"},
    {"push_reverse_bytes", "B", 0, 256, false, "acknowledgement of a pushed packet"},
    {"pull_forward_bytes", "B", 0, 256, false, "header beside a pulled packet"},
    {"pull_reverse_bytes", "B", 0, 256, false, "request for a pulled packet"},
    {"remote_load_us", "us", 0, 1000, false, "one acquiring load from a peer"},
    {"local_load_us", "us", 0, 1000, false, "one acquiring load from own memory"},
    {"signal_us", "us", 0, 1000, false, "a peer's flag, one way"},
    {"sm_pull_gbps", "GB/s", 0.1, 1000, false, "one SM that only pulls"},
    {"sm_push_gbps", "GB/s", 0.1, 1000, false, "one SM that only pushes"},
    {"sm_beside_gbps", "GB/s", 0.1, 1000, false, "one communication CTA beside GEMMs"},
    {"spare_warp_gbps", "GB/s", 0.1, 1000, false, "the spare warps of one GEMM CTA"},
    {"sm_merge_gbps", "GB/s", 0.1, 1000, false, "memory bytes of one merging SM"},
    {"spare_merge_gbps", "GB/s", 0.1, 1000, false, "the same, spare warps only"},
    {"launch_us", "us", 0, 1000, false, "one launch in a stream of launches"},
    {"grid_sync_us", "us", 0, 1000, false, "all CTAs of a GPU meet"},
    {"schedule_base_us", "us", 0, 10000, false, "handshake and tables"},
    {"schedule_ns_per_route", "ns", 0, 1000, false, "sorting one own route"},
    {"domain_ranks", "GPUs", 1, 100000, true, "GPUs that share loads and stores"},
    {"network_gbps", "GB/s", 0.1, 10000, false, "between domains, one direction, per GPU"},
    {"network_us", "us", 0, 10000, false, "one message between domains"},
}};

[[noreturn]] void fail(const std::string& sentence) {
  throw Error(ErrorCode::invalid_argument, sentence);
}

std::string_view closest_field(std::string_view word) {
  std::array<std::string_view, kNumFields> known;
  std::transform(kRules.begin(), kRules.end(), known.begin(),
                 [](const FieldRule& r) { return r.name; });
  return closest(word, known);
}

std::string text_at(const Json& json, const char* key, const std::string& where) {
  if (!json.contains(key) || !json.at(key).is_string() || json.at(key).get<std::string>().empty())
    fail(fmt::format("{}: '{}' must be a text that is not empty", where, key));
  return json.at(key).get<std::string>();
}

Constant parse_constant(const Json& json, const FieldRule& r, const std::string& where) {
  if (!json.is_object() || !json.contains("value"))
    fail(fmt::format("{}: {} must be {{\"value\": number or null, \"source\": text}}", where,
                     r.name));
  Constant c;
  c.source = text_at(json, "source", fmt::format("{}: {}", where, r.name));
  const Json& value = json.at("value");
  if (value.is_null()) {
    if (r.required)
      fail(fmt::format("{}: {} is null; nothing can be assumed for {}", where, r.name, r.what));
    return c;
  }
  if (!value.is_number())
    fail(fmt::format("{}: {} is {}; it must be a number of {} or null", where, r.name, value.dump(),
                     r.unit));
  c.value = value.get<double>();
  c.known = true;
  if (!(c.value >= r.min && c.value <= r.max)) {
    fail(fmt::format("{}: {} is {} {}, must be between {} and {} ({}); nearest legal value {}",
                     where, r.name, c.value, r.unit, r.min, r.max, r.what,
                     std::clamp(c.value, r.min, r.max)));
  }
  return c;
}

double positive_at(const Json& json, const char* key, const std::string& where) {
  if (!json.contains(key) || !json.at(key).is_number() || json.at(key).get<double>() <= 0)
    fail(fmt::format("{}: a gemm_measured row needs '{}' > 0", where, key));
  return json.at(key).get<double>();
}

}  // namespace

const FieldRule& rule(Field field) { return kRules[static_cast<std::size_t>(field)]; }
const char* name(Load load) { return load == Load::burst ? "burst" : "sustained"; }

DeviceRecord parse_device(std::string_view text, const std::string& where) {
  const Json json = Json::parse(text, nullptr, false);
  if (json.is_discarded() || !json.is_object())
    fail(fmt::format("{} is no JSON object; docs/planner.md shows a device record", where));
  DeviceRecord record;
  record.name = text_at(json, "name", where);
  record.title = text_at(json, "title", where);
  record.constants.resize(kNumFields);
  if (!json.contains("constants") || !json.at("constants").is_object())
    fail(fmt::format("{}: 'constants' is missing; docs/planner.md lists them", where));
  for (const auto& [key, value] : json.at("constants").items()) {
    const auto at = std::find_if(kRules.begin(), kRules.end(),
                                 [&](const FieldRule& r) { return key == r.name; });
    if (at == kRules.end()) {
      fail(fmt::format("{}: constant '{}' is not known; the nearest known one is '{}'", where, key,
                       closest_field(key)));
    }
    record.constants[static_cast<std::size_t>(at - kRules.begin())] =
        parse_constant(value, *at, where);
  }
  for (std::size_t i = 0; i < kNumFields; ++i) {
    if (record.constants[i].source.empty()) {
      fail(fmt::format("{}: constant '{}' ({}, {}) is missing; {}", where, kRules[i].name,
                       kRules[i].what, kRules[i].unit,
                       kRules[i].required ? "it has no default" : "write null if it is not known"));
    }
  }
  const Json rows = json.value("gemm_measured", Json::array());
  for (const Json& row : rows) {
    GemmPoint p;
    p.tile_rows = static_cast<std::int64_t>(positive_at(row, "tile_rows", where));
    p.tile_cols = static_cast<std::int64_t>(positive_at(row, "tile_cols", where));
    p.k = static_cast<std::int64_t>(positive_at(row, "k", where));
    p.tflops = positive_at(row, "tflops", where);
    p.clock_mhz = positive_at(row, "clock_mhz", where);
    p.source = text_at(row, "source", where);
    record.gemm.push_back(p);
  }
  return record;
}

std::vector<std::string> device_names() {
  std::vector<std::string> names;
  for (const EmbeddedFile& file : embedded_devices()) names.emplace_back(file.name);
  return names;
}

std::string device_json(const std::string& name) {
  for (const EmbeddedFile& file : embedded_devices()) {
    if (file.name == name) return std::string(file.text);
  }
  const std::vector<std::string> names = device_names();
  const std::vector<std::string_view> known(names.begin(), names.end());
  fail(
      fmt::format("device '{}' is not known; the nearest known one is '{}' (a record of your own: "
                  "give its path, ending in .json)",
                  name, closest(name, known)));
}

DeviceRecord find_device(const std::string& name) {
  if (name.find('/') == std::string::npos && !name.ends_with(".json"))
    return parse_device(device_json(name), "device " + name);
  std::ifstream file(name, std::ios::binary);
  std::ostringstream text;
  text << file.rdbuf();
  if (!file) fail(fmt::format("device record {} cannot be read", name));
  return parse_device(text.str(), name);
}

WireBytes pull_wire(const Machine& m) {
  const double payload = m[Field::packet_payload_bytes];
  return {1 + m[Field::pull_forward_bytes] / payload, m[Field::pull_reverse_bytes] / payload};
}
WireBytes push_wire(const Machine& m) {
  const double payload = m[Field::packet_payload_bytes];
  return {1 + m[Field::push_forward_bytes] / payload, m[Field::push_reverse_bytes] / payload};
}

}  // namespace moxie::planner
