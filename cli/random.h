// Random numbers that depend only on (seed, stream, index): the same values on every machine, in
// any order, and for any number of ranks, so that a run with --ranks 8 computes on the same experts
// as a run with --ranks 1.
#pragma once
#include <cmath>
#include <cstdint>
#include <span>
#include <string_view>

#include "moxie/core/dtype.h"

namespace moxie::cli {

constexpr std::uint64_t mix(std::uint64_t z) {  // the finaliser of splitmix64
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return z ^ (z >> 31);
}

// One stream of a seed: `Random{seed, "gate", expert}`.
class Random {
 public:
  Random(std::uint64_t seed, std::string_view name, std::int64_t index = 0)
      : key_(mix(seed + 0x9e3779b97f4a7c15ull)) {
    for (const char c : name) key_ = mix(key_ ^ static_cast<unsigned char>(c));
    key_ = mix(key_ ^ static_cast<std::uint64_t>(index) * 0x9e3779b97f4a7c15ull);
  }
  std::uint64_t bits(std::uint64_t index) const {
    return mix(key_ + index * 0x9e3779b97f4a7c15ull);
  }
  double uniform(std::uint64_t index) const {  // in (0, 1)
    return (static_cast<double>(bits(index) >> 11) + 0.5) * 0x1.0p-53;
  }
  float unit(std::uint64_t index) const {  // mean 0, variance 1 (uniform: cheap, bounded)
    constexpr float kScale = 3.4641016f;   // sqrt(12)
    return (static_cast<float>(bits(index) >> 40) * 0x1.0p-24f - 0.5f) * kScale;
  }
  std::uint64_t below(std::uint64_t index, std::uint64_t bound) const {
    return bits(index) % bound;
  }

  template <class T>
  void fill(std::span<T> out, float scale) const {
    for (std::size_t i = 0; i < out.size(); ++i) out[i] = T(unit(i) * scale);
  }

 private:
  std::uint64_t key_;
};

}  // namespace moxie::cli
