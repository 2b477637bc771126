// Reading is strict: a key that is missing or of another type is a Failure that names it.
#include "cli/json.h"

#include <fmt/format.h>
#include <sys/utsname.h>

#include <array>
#include <fstream>
#include <thread>

#include "cli/errors.h"
#include "cli/files.h"
#include "cli/options.h"

namespace moxie::cli {
namespace {

constexpr std::array<std::string_view, 3> kActivations = {"swiglu", "swiglu_clamped", "gpt_oss"};
constexpr std::array<std::string_view, 2> kDTypes = {"f32", "bf16"};

const Json& at(const Json& json, const char* key, const std::string& where) {
  if (!json.is_object() || !json.contains(key))
    throw Failure(fmt::format("{}: '{}' is missing", where, key));
  return json.at(key);
}

bool boolean_at(const Json& json, const char* key, const std::string& where) {
  const Json& value = at(json, key, where);
  if (!value.is_boolean())
    throw Failure(fmt::format("{}: '{}' is {}, not true or false", where, key, value.dump()));
  return value.get<bool>();
}

float real_at(const Json& json, const char* key, const std::string& where) {
  const Json& value = at(json, key, where);
  if (!value.is_number())
    throw Failure(fmt::format("{}: '{}' is {}, not a number", where, key, value.dump()));
  return value.get<float>();
}

std::size_t choice_at(const Json& json, const char* key, std::span<const std::string_view> known,
                      const std::string& where) {
  const Json& value = at(json, key, where);
  if (!value.is_string())
    throw Failure(fmt::format("{}: '{}' is {}, not a word", where, key, value.dump()));
  try {
    return parse_choice(fmt::format("{}: '{}'", where, key), value.get<std::string>(), known);
  } catch (const Usage& usage) {
    throw Failure(usage.what());
  }
}

// 1.702f as 1.702, not as 1.7020000219345093; reading it back gives the same float.
double shortest(float value) { return std::stod(fmt::format("{}", value)); }

std::string cpu_model() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with("model name")) return line.substr(line.find(':') + 2);
  }
  return "unknown";
}

}  // namespace

std::string to_text(const Json& json) {
  return json.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
}

Json to_json(const Problem& p) {
  return {
      {"num_ranks", p.num_ranks},
      {"max_tokens", p.max_tokens},
      {"hidden", p.hidden},
      {"intermediate", p.intermediate},
      {"num_experts", p.num_experts},
      {"top_k", p.top_k},
      {"dtype", name(p.dtype)},
      {"activation",
       {{"kind", name(p.activation.kind)},
        {"limit", shortest(p.activation.limit)},
        {"alpha", shortest(p.activation.alpha)}}},
      {"expert_bias", p.expert_bias},
      {"shared", {{"intermediate", p.shared.intermediate}, {"output_gate", p.shared.output_gate}}}};
}

Json to_json(const Plan& p) {
  return {{"mode", name(p.mode)},
          {"order", name(p.order)},
          {"dispatch", name(p.dispatch)},
          {"combine", name(p.combine)},
          {"num_slabs", p.num_slabs},
          {"band_blocks", p.band_blocks},
          {"lag_bands", p.lag_bands},
          {"minibatch_blocks", p.minibatch_blocks},
          {"capacity_rows", p.capacity_rows},
          {"x_ring_blocks", p.x_ring_blocks},
          {"hidden_ring_blocks", p.hidden_ring_blocks},
          {"chunk_blocks", p.chunk_blocks},
          {"lag_chunks", p.lag_chunks},
          {"backward_ring_blocks", p.backward_ring_blocks},
          {"save", name(p.save)},
          {"saved_rows", p.saved_rows},
          {"comm_workers", p.comm_workers},
          {"compute_workers", p.compute_workers}};
}

Json machine_json() {
  utsname system{};
  uname(&system);
  return {{"cores", std::thread::hardware_concurrency()},
          {"cpu", cpu_model()},
          {"system", fmt::format("{} {} {}", system.sysname, system.release, system.machine)}};
}

std::int64_t integer_at(const Json& json, const char* key, const std::string& where) {
  const Json& value = at(json, key, where);
  if (!value.is_number_integer())
    throw Failure(fmt::format("{}: '{}' is {}, not a whole number", where, key, value.dump()));
  return value.get<std::int64_t>();
}

Problem problem_from_json(const Json& json, const std::string& where) {
  Problem p;
  p.num_ranks = integer_at(json, "num_ranks", where);
  p.max_tokens = integer_at(json, "max_tokens", where);
  p.hidden = integer_at(json, "hidden", where);
  p.intermediate = integer_at(json, "intermediate", where);
  p.num_experts = integer_at(json, "num_experts", where);
  p.top_k = integer_at(json, "top_k", where);
  p.dtype = choice_at(json, "dtype", kDTypes, where) == 0 ? DType::f32 : DType::bf16;
  const Json& activation = at(json, "activation", where);
  p.activation.kind =
      static_cast<ActivationKind>(choice_at(activation, "kind", kActivations, where));
  p.activation.limit = real_at(activation, "limit", where);
  p.activation.alpha = real_at(activation, "alpha", where);
  p.expert_bias = boolean_at(json, "expert_bias", where);
  const Json& shared = at(json, "shared", where);
  p.shared.intermediate = integer_at(shared, "intermediate", where);
  p.shared.output_gate = boolean_at(shared, "output_gate", where);
  try {
    check(p);
  } catch (const Error& error) {
    throw Failure(fmt::format("{}: {}", where, error.what()));
  }
  return p;
}

Json parse_json_file(const std::string& path) {
  const std::string content = read_file(path);
  try {
    return Json::parse(content);
  } catch (const nlohmann::json::parse_error& error) {
    throw Failure(fmt::format("{} is not JSON: parsing failed at byte {} of {}", path, error.byte,
                              content.size()));
  }
}

}  // namespace moxie::cli
