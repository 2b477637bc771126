// File names follow from the table in tensors.h: DIR/rank<r>/<name>.npy, or <name>.bf16.npy for
// BF16 bits.
#include "cli/dump.h"

#include <fmt/format.h>

#include <algorithm>

#include "cli/errors.h"
#include "cli/files.h"
#include "cli/json.h"
#include "cli/npy.h"

namespace moxie::cli {
namespace fs = std::filesystem;
namespace {

constexpr int kFormat = 1;  // raised when a reader of the old form would misread the new one

std::string_view descr(DType dtype) {
  switch (dtype) {
    case DType::f32: return "<f4";
    case DType::bf16: return "<u2";
    case DType::i32: return "<i4";
    case DType::i64: return "<i8";
  }
  return "?";
}

fs::path file_path(const fs::path& folder, std::size_t rank, const char* name, DType dtype) {
  return folder / fmt::format("rank{}", rank) /
         fmt::format("{}{}.npy", name, dtype == DType::bf16 ? ".bf16" : "");
}

std::vector<std::int64_t> extents(const Shape& shape) {
  return {shape.dim.begin(), shape.dim.begin() + shape.rank};
}

void write_tensor(const fs::path& folder, std::size_t rank, const char* name,
                  const HostTensor& tensor) {
  if (tensor.absent()) return;
  write_npy(file_path(folder, rank, name, tensor.dtype), descr(tensor.dtype), extents(tensor.shape),
            {reinterpret_cast<const char*>(tensor.bytes.data()), tensor.bytes.size()});
}

}  // namespace

void write_dump(const fs::path& staging, const Setup& setup, const Plan& plan,
                const std::string& origin, std::span<const RankTensors> inputs,
                std::span<const RankResults> results) {
  for (std::size_t rank = 0; rank < inputs.size(); ++rank) {
    fs::create_directory(staging / fmt::format("rank{}", rank));
    for (const auto& [name, member] : input_names())
      write_tensor(staging, rank, name, inputs[rank].*member);
    for (const auto& [name, member, backward] : result_names())
      write_tensor(staging, rank, name, results[rank].*member);
  }
  const Json json = {{"format", kFormat},      {"problem", to_json(setup.problem)},
                     {"tokens", setup.tokens}, {"ids", name(setup.types.ids)},
                     {"origin", origin},       {"plan", to_json(plan)}};
  write_file(staging / "problem.json", to_text(json));
}

void read_dump_setup(const std::string& folder, Setup& setup) {
  std::error_code error;
  if (!fs::is_directory(folder, error))
    throw Failure(fmt::format("--inputs folder {} does not exist", folder));
  const std::string where = (fs::path(folder) / "problem.json").string();
  const Json json = parse_json_file(where);
  if (const std::int64_t format = integer_at(json, "format", where); format != kFormat) {
    throw Failure(fmt::format("{}: 'format' is {}; this program reads {}", where, format, kFormat));
  }
  if (!json.contains("problem")) throw Failure(fmt::format("{}: 'problem' is missing", where));
  setup.problem = problem_from_json(json.at("problem"), where);
  const Json& tokens = json.contains("tokens") ? json.at("tokens") : Json();
  const bool numbers =
      tokens.is_array() && std::all_of(tokens.begin(), tokens.end(), [](const Json& n) {
        return n.is_number_integer() && n.get<std::int64_t>() >= 0;
      });
  if (!numbers || static_cast<std::int64_t>(tokens.size()) != setup.problem.num_ranks) {
    throw Failure(
        fmt::format("{}: 'tokens' is {}; it must be a list of {} whole numbers, one per rank",
                    where, tokens.dump(), setup.problem.num_ranks));
  }
  setup.tokens = tokens.get<std::vector<std::int64_t>>();
  for (std::size_t rank = 0; rank < setup.tokens.size(); ++rank) {
    if (setup.tokens[rank] > setup.problem.max_tokens) {
      throw Failure(fmt::format("{}: 'tokens' of rank {} is {}; it must be at most max_tokens, {}",
                                where, rank, setup.tokens[rank], setup.problem.max_tokens));
    }
  }
  setup.types.ids = json.contains("ids") && json.at("ids") == "i64" ? DType::i64 : DType::i32;
  setup.shape_name = folder;
}

std::vector<RankTensors> read_dump_inputs(const std::string& folder, const Setup& setup) {
  std::vector<RankTensors> ranks;
  for (std::size_t rank = 0; rank < setup.tokens.size(); ++rank) {
    RankTensors tensors = allocate_inputs(setup.problem, setup.types,
                                          static_cast<std::int64_t>(rank), setup.tokens[rank]);
    for (const auto& [name, member] : input_names()) {
      HostTensor& tensor = tensors.*member;
      if (tensor.absent()) continue;
      const fs::path path = file_path(folder, rank, name, tensor.dtype);
      std::error_code error;
      if (!fs::exists(path, error) && std::string_view(name) == "dy") {
        if (!setup.backward) continue;
        throw Failure(fmt::format(
            "file {} does not exist; backward needs it (or give --forward-only)", path.string()));
      }
      const NpyArray array = read_npy(path, descr(tensor.dtype), extents(tensor.shape));
      std::transform(array.bytes.begin(), array.bytes.end(), tensor.bytes.begin(),
                     [](char c) { return static_cast<std::byte>(c); });
    }
    ranks.push_back(std::move(tensors));
  }
  return ranks;
}

}  // namespace moxie::cli
