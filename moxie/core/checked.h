// Integer arithmetic that is used for sizes and offsets. All of it is 64-bit, but for quotients of
// indices; the checked forms are for sizes that come from a user and could overflow even that.
#pragma once
#include <cstdint>

#include "moxie/core/hd.h"

namespace moxie {

MOXIE_HD constexpr std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }
MOXIE_HD constexpr std::int64_t align_up(std::int64_t a, std::int64_t b) {
  return ceil_div(a, b) * b;
}
MOXIE_HD constexpr std::int64_t min64(std::int64_t a, std::int64_t b) { return a < b ? a : b; }
MOXIE_HD constexpr std::int64_t max64(std::int64_t a, std::int64_t b) { return a > b ? a : b; }

// Of indices, which are below 2^32: a GPU divides 64-bit numbers in twice the instructions, and a
// call.
MOXIE_HD constexpr std::int64_t quotient(std::int64_t a, std::int64_t b) {
  return static_cast<std::uint32_t>(a) / static_cast<std::uint32_t>(b);
}
MOXIE_HD constexpr std::int64_t remainder(std::int64_t a, std::int64_t b) {
  return static_cast<std::uint32_t>(a) % static_cast<std::uint32_t>(b);
}

// a * b, or -1 when the product does not fit (both operands must be >= 0).
MOXIE_HD constexpr std::int64_t mul_or_negative(std::int64_t a, std::int64_t b) {
  if (a < 0 || b < 0) return -1;
  if (a == 0 || b == 0) return 0;
  return a > INT64_MAX / b ? -1 : a * b;
}

}  // namespace moxie
