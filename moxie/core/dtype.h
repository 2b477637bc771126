// Storage types. BF16 is stored as its 16 bits and converted with round-to-nearest-even; all
// arithmetic is FP32. The CPU twin rounds exactly where the GPU kernel rounds (see
// expert/expert.h), hence the shared conversion.
#pragma once
#include <bit>
#include <cstddef>
#include <cstdint>

#include "moxie/core/hd.h"

namespace moxie {

enum class DType : std::int32_t { f32, bf16, i32, i64 };  // i32, i64: expert ids only

MOXIE_HD constexpr std::int64_t size_bytes(DType t) {
  return t == DType::bf16 ? 2 : t == DType::i64 ? 8 : 4;
}
constexpr const char* name(DType t) {
  return t == DType::f32 ? "f32" : t == DType::bf16 ? "bf16" : t == DType::i32 ? "i32" : "i64";
}

struct bf16 {
  std::uint16_t bits = 0;
  bf16() = default;
  constexpr explicit bf16(float f) {
    const auto u = std::bit_cast<std::uint32_t>(f);
    if ((u & 0x7fffffffu) > 0x7f800000u) {
      bits = static_cast<std::uint16_t>((u >> 16) | 0x40u);  // NaN stays NaN
    } else {
      bits = static_cast<std::uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
    }
  }
  constexpr explicit operator float() const {
    return std::bit_cast<float>(std::uint32_t{bits} << 16);
  }
};
static_assert(sizeof(bf16) == 2);

template <class T>
constexpr DType dtype_of();
template <>
constexpr DType dtype_of<float>() {
  return DType::f32;
}
template <>
constexpr DType dtype_of<bf16>() {
  return DType::bf16;
}
template <>
constexpr DType dtype_of<std::int32_t>() {
  return DType::i32;
}
template <>
constexpr DType dtype_of<std::int64_t>() {
  return DType::i64;
}

}  // namespace moxie
