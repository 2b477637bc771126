// Reading, judging and replacing the file of tuned plans. Keys are compared as JSON values: the
// order of their parts does not matter.
#include "moxie/planner/plan_cache.h"

#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "moxie/core/error.h"

namespace moxie::planner {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;
constexpr int kFormat = 1;  // of the file; another number is another program's

struct CacheFile {
  bool exists = false;
  std::string unusable;  // why; empty: `entries` holds
  OrderedJson entries = OrderedJson::array();
};

CacheFile read_cache(const std::string& file) {
  CacheFile cache;
  std::error_code error;
  cache.exists = fs::exists(file, error);
  if (!cache.exists) return cache;
  std::ifstream stream(file, std::ios::binary);
  std::ostringstream text;
  text << stream.rdbuf();
  const OrderedJson json = OrderedJson::parse(text.str(), nullptr, false);
  if (!stream) {
    cache.unusable = "it cannot be read";
  } else if (json.is_discarded() || !json.is_object()) {
    cache.unusable = "it is no JSON object";
  } else if (!json.contains("format") || json.at("format") != kFormat) {
    cache.unusable =
        fmt::format("its format is {}, must be {}",
                    json.contains("format") ? json.at("format").dump() : "missing", kFormat);
  } else if (!json.contains("entries") || !json.at("entries").is_array()) {
    cache.unusable = "it has no list 'entries'";
  } else {
    cache.entries = json.at("entries");
  }
  return cache;
}

bool has_key(const OrderedJson& entry, const Json& key) {
  return entry.is_object() && entry.contains("key") && Json(entry.at("key")) == key;
}

[[noreturn]] void fail_to_write(const std::string& file, const std::string& why) {
  throw Error(ErrorCode::unavailable,
              fmt::format("plan cache {} cannot be written: {}; name another file", file, why));
}

CacheFile usable_cache(const std::string& file) {
  CacheFile cache = read_cache(file);
  if (cache.unusable.empty()) return cache;
  throw Error(ErrorCode::unavailable,
              fmt::format("plan cache {} cannot be added to: {}; remove it or name another file",
                          file, cache.unusable));
}

void replace_file(const std::string& file, const std::string& text) {
  std::error_code error;
  const fs::path folder = fs::path(file).parent_path();
  if (!folder.empty()) fs::create_directories(folder, error);
  if (error) fail_to_write(file, error.message());
  const std::string temporary = fmt::format("{}.tmp{}", file, ::getpid());
  errno = 0;
  std::ofstream stream(temporary, std::ios::binary | std::ios::trunc);
  stream << text;
  stream.close();
  const std::string reason = std::strerror(errno);
  if (stream) {
    fs::rename(temporary, file, error);
    if (!error) return;
  }
  std::error_code ignored;
  fs::remove(temporary, ignored);
  fail_to_write(file, error ? error.message() : reason);
}

CachedPlan find_entry(const CacheFile& cache, const std::string& file, const PlanKey& key) {
  const Json wanted = to_json(key);
  for (const OrderedJson& entry : cache.entries) {
    if (!has_key(entry, wanted)) continue;
    try {
      const std::string where = fmt::format("plan cache {}: the plan of this layer", file);
      Plan plan = plan_from_json(entry.contains("plan") ? Json(entry.at("plan")) : Json(), where);
      plan = pipeline::resolve(key.problem, plan);
      pipeline::check(key.problem, plan);
      return {plan, fmt::format("plan cache {}", file)};
    } catch (const Error& error) {
      return {{}, fmt::format("an entry of plan cache {} was ignored: {}", file, error.what())};
    }
  }
  return {{}, fmt::format("plan cache {} has no entry for this layer and machine", file)};
}

}  // namespace

OrderedJson to_json(const PlanKey& key) {
  const MachineId& m = key.machine;
  return {{"moxie", MOXIE_VERSION},
          {"passes", name(key.passes)},
          {"machine",
           {{"backend", m.backend},
            {"device", m.device},
            {"sms", m.num_sms},
            {"ranks_of_devices", m.ranks_of_devices},
            {"reserve_sms", m.reserve_sms},
            {"cluster_size", m.cluster_size},
            {"driver", m.driver},
            {"runtime", m.runtime}}},
          {"problem", to_json(key.problem)}};
}

CachedPlan find_plan(const std::string& file, std::span<const PlanKey> keys) {
  if (file.empty()) return {{}, "no plan cache"};
  const CacheFile cache = read_cache(file);
  if (!cache.exists) return {{}, fmt::format("plan cache {} does not exist", file)};
  if (!cache.unusable.empty())
    return {{}, fmt::format("plan cache {} was ignored: {}", file, cache.unusable)};
  CachedPlan found;
  for (const PlanKey& key : keys) {
    found = find_entry(cache, file, key);
    if (found.plan) break;
  }
  return found;
}

void check_plan_cache(const std::string& file) { usable_cache(file); }

void store_plan(const std::string& file, const PlanKey& key, const Plan& plan,
                const OrderedJson& measured) {
  const Plan resolved = pipeline::resolve(key.problem, plan);
  pipeline::check(key.problem, resolved);
  const CacheFile cache = usable_cache(file);
  // One entry per layer and machine: that of an older Moxie goes.
  Json wanted = to_json(key);
  wanted.erase("moxie");
  OrderedJson kept = OrderedJson::array();
  for (const OrderedJson& entry : cache.entries) {
    if (!entry.is_object() || !entry.contains("key") || !entry.at("key").is_object()) continue;
    Json other = entry.at("key");
    other.erase("moxie");
    if (other != wanted) kept.push_back(entry);
  }
  kept.push_back({{"key", to_json(key)}, {"plan", to_json(resolved)}, {"measured", measured}});
  const OrderedJson json = {{"format", kFormat}, {"entries", kept}};
  replace_file(file, json.dump(1, ' ', false, OrderedJson::error_handler_t::replace) + "\n");
}

}  // namespace moxie::planner
