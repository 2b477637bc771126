// Reading is strict: a key that is missing or of another type is a Failure that names it.
#include "cli/json.h"

#include <fmt/format.h>
#include <sys/utsname.h>

#include <array>
#include <thread>

#include "cli/errors.h"
#include "cli/files.h"
#include "cli/options.h"
#include "moxie/core/machine.h"

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

}  // namespace

std::string to_text(const Json& json) {
  return json.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
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
