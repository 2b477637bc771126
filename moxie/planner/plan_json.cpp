// One table of a plan's counts serves both ways; words are those of name().
#include "moxie/planner/plan_json.h"

#include <fmt/format.h>

#include <array>
#include <limits>

#include "moxie/core/error.h"

namespace moxie::planner {
namespace {

// 1.702f as 1.702, not as 1.7020000219345093; reading it back gives the same float.
double shortest(float value) { return std::stod(fmt::format("{}", value)); }

[[noreturn]] void fail(const std::string& sentence) {
  throw Error(ErrorCode::invalid_plan, sentence);
}

template <class Enum, std::size_t kCount>
void read_word(const nlohmann::json& json, const char* key, const std::array<Enum, kCount>& values,
               const std::string& where, Enum& to) {
  const nlohmann::json& word = json.at(key);
  std::string known;
  for (const Enum value : values) {
    if (word == name(value)) {
      to = value;
      return;
    }
    known += fmt::format("{}{}", known.empty() ? "" : ", ", name(value));
  }
  fail(fmt::format("{}: {} is {}, must be one of {}", where, key, word.dump(), known));
}

template <class Int>
void read_count(const nlohmann::json& json, const char* key, const std::string& where, Int& to) {
  const nlohmann::json& value = json.at(key);
  const bool fits = value.is_number_integer() &&
                    value.get<double>() >= static_cast<double>(std::numeric_limits<Int>::min()) &&
                    value.get<double>() <= static_cast<double>(std::numeric_limits<Int>::max());
  if (!fits) fail(fmt::format("{}: {} is {}, must be a whole number", where, key, value.dump()));
  to = value.get<Int>();
}

// Calls visit(name, field) for every count of a plan, in the order of its declaration.
template <class AnyPlan, class Visit>
void for_each_count(AnyPlan& p, Visit&& visit) {
  visit("num_slabs", p.num_slabs);
  visit("band_blocks", p.band_blocks);
  visit("lag_bands", p.lag_bands);
  visit("minibatch_blocks", p.minibatch_blocks);
  visit("capacity_rows", p.capacity_rows);
  visit("x_ring_blocks", p.x_ring_blocks);
  visit("hidden_ring_blocks", p.hidden_ring_blocks);
  visit("chunk_blocks", p.chunk_blocks);
  visit("lag_chunks", p.lag_chunks);
  visit("backward_ring_blocks", p.backward_ring_blocks);
  visit("saved_rows", p.saved_rows);
  visit("comm_workers", p.comm_workers);
  visit("compute_workers", p.compute_workers);
}

}  // namespace

OrderedJson to_json(const Problem& p) {
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

OrderedJson to_json(const Plan& p) {
  OrderedJson json = {{"mode", name(p.mode)},
                      {"order", name(p.order)},
                      {"dispatch", name(p.dispatch)},
                      {"combine", name(p.combine)},
                      {"save", name(p.save)}};
  for_each_count(p, [&](const char* field, auto value) { json[field] = value; });
  return json;
}

Plan plan_from_json(const nlohmann::json& json, const std::string& where) {
  if (!json.is_object()) fail(fmt::format("{} is no JSON object", where));
  const OrderedJson known = to_json(Plan{});
  for (const auto& [key, value] : known.items())
    if (!json.contains(key)) fail(fmt::format("{}: {} is missing", where, key));
  for (const auto& [key, value] : json.items())
    if (!known.contains(key)) fail(fmt::format("{}: {} is no part of a plan", where, key));
  Plan p;
  read_word(json, "mode", std::array{ExecMode::fused, ExecMode::split}, where, p.mode);
  read_word(json, "order", std::array{TaskOrder::slabs, TaskOrder::lag}, where, p.order);
  read_word(json, "dispatch", std::array{DispatchMode::pull, DispatchMode::push}, where,
            p.dispatch);
  read_word(json, "combine", std::array{CombineMode::epilogue, CombineMode::comm_workers}, where,
            p.combine);
  read_word(json, "save", std::array{SavePolicy::none, SavePolicy::z, SavePolicy::z_and_x}, where,
            p.save);
  for_each_count(p, [&](const char* field, auto& value) { read_count(json, field, where, value); });
  return p;
}

}  // namespace moxie::planner
