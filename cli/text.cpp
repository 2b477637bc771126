// The byte embedding. Values are rounded to the storage type at the end, and the router sees the
// rounded ones, so that a dump of x and ids can be checked by an outside program.
#include "cli/text.h"

#include <fmt/format.h>

#include <array>
#include <cmath>
#include <filesystem>
#include <vector>

#include "cli/errors.h"
#include "cli/files.h"
#include "cli/random.h"

namespace moxie::cli {
namespace fs = std::filesystem;
namespace {

constexpr std::size_t kContext = 8;      // bytes that shape a token, itself included
constexpr float kDecay = 0.6f;           // weight of the byte before, the one before that: 0.36 ...
constexpr std::size_t kRotation = 37;    // a byte at another distance is another vector
constexpr float kPositionScale = 0.25f;  // of the sinusoids that carry the position

constexpr const char* kBuiltInText =
    "A mixture-of-experts layer keeps many small networks and asks only a few of them for each "
    "token. A router looks "
    "at the token and names the experts; the token travels to the machines that hold them, each "
    "expert does its two "
    "products, and the results travel home, where they are weighted and added. Nobody knows before "
    "the router has "
    "run how much work each machine will get. Some experts are asked for all the time and some "
    "hardly ever, because "
    "language is like that: a few words are everywhere and most are rare. So the layer has to find "
    "its balance while "
    "it runs: rows are pulled where they are needed, computed as soon as they have arrived, and "
    "pushed home as soon "
    "as they are done, and nothing waits for anything that it does not need.\n";

// [256, H]
std::vector<float> byte_vectors(std::size_t H, std::uint64_t seed) {
  std::vector<float> vectors(256 * H);
  Random(seed, "byte embedding").fill(std::span<float>(vectors), 1.0f);
  return vectors;
}

std::vector<double> position_frequencies(std::size_t H) {
  std::vector<double> frequencies;
  for (std::size_t h = 0; h < H; h += 2) {
    frequencies.push_back(std::pow(10000.0, -static_cast<double>(h) / static_cast<double>(H)));
  }
  return frequencies;
}

void embed_token(const std::string& bytes, std::size_t position, const std::vector<float>& vectors,
                 const std::vector<double>& frequencies, std::vector<float>& row) {
  const std::size_t H = row.size();
  std::fill(row.begin(), row.end(), 0.0f);
  float scale = 1;
  for (std::size_t back = 0; back < kContext && back <= position; ++back, scale *= kDecay) {
    const auto byte = static_cast<unsigned char>(bytes[(position - back) % bytes.size()]);
    const float* vector = vectors.data() + std::size_t{byte} * H;
    const std::size_t shift = back * kRotation % H;
    for (std::size_t h = 0; h < H; ++h)
      row[h] += scale * vector[h < shift ? h + H - shift : h - shift];
  }
  for (std::size_t h = 0; h + 1 < H; h += 2) {
    const double angle = static_cast<double>(position) * frequencies[h / 2];
    row[h] += kPositionScale * static_cast<float>(std::sin(angle));
    row[h + 1] += kPositionScale * static_cast<float>(std::cos(angle));
  }
  double squares = 0;
  for (const float v : row) squares += double{v} * v;
  const auto inverse_rms =
      static_cast<float>(1 / std::sqrt(squares / static_cast<double>(H) + 1e-6));
  for (float& v : row) v *= inverse_rms;
}

template <class T>
void store_row(const std::vector<float>& row, std::size_t token, HostTensor& x) {
  const std::span<T> out = x.as<T>().subspan(token * row.size(), row.size());
  for (std::size_t h = 0; h < row.size(); ++h) out[h] = T(row[h]);
}

}  // namespace

Text load_text(const std::string& path) {
  Text text{path, read_file(path)};
  if (text.bytes.empty())
    throw Failure(fmt::format("text file {} is empty; at least one byte is needed", path));
  return text;
}

Text default_text() {
  std::error_code error;
  const fs::path program = fs::read_symlink("/proc/self/exe", error);
  for (fs::path folder = program.parent_path(); !error && folder.has_relative_path();
       folder = folder.parent_path()) {
    const bool source_tree = fs::exists(folder / "moxie" / "moxie.h", error);
    for (const fs::path& path :
         {source_tree ? folder / "README.md" : fs::path(), folder / "share/moxie/README.md"}) {
      if (!path.empty() && fs::is_regular_file(path, error) && fs::file_size(path, error) > 0) {
        return {"README.md", read_file(path)};
      }
    }
    error.clear();
  }
  return {"the built-in text", kBuiltInText};
}

void embed_text(const Text& text, const Problem& problem, std::uint64_t seed,
                std::span<RankTensors> ranks) {
  const auto H = static_cast<std::size_t>(problem.hidden);
  const std::vector<float> vectors = byte_vectors(H, seed);
  const std::vector<double> frequencies = position_frequencies(H);
  std::vector<float> row(H);
  std::size_t position = 0;
  for (RankTensors& rank : ranks) {
    const auto num_tokens = static_cast<std::size_t>(rank.x.shape.dim[0]);
    for (std::size_t token = 0; token < num_tokens; ++token, ++position) {
      embed_token(text.bytes, position, vectors, frequencies, row);
      problem.dtype == DType::f32 ? store_row<float>(row, token, rank.x)
                                  : store_row<bf16>(row, token, rank.x);
    }
  }
}

}  // namespace moxie::cli
