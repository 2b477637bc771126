// A tensor that owns its bytes. A new one is filled with 0xFF (NaN in every float type), so that
// whatever the library leaves unwritten shows. Conversions are written here again, on purpose:
// tests must not trust core/dtype.h.
#pragma once
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include "moxie/core/tensor.h"

namespace moxie::test {

// The nearest value towards zero that `dtype` can hold exactly. Random inputs need no better
// rounding. Arithmetic instead of masking bits: GCC 12.2 -O2 drops the mask of
// `if (bf16) bits &= 0xffff0000` between two bit_casts.
inline double representable(double value, DType dtype) {
  const int significant_bits = dtype == DType::bf16 ? 8 : 24;
  int exponent = 0;
  const double fraction = std::frexp(value, &exponent);
  return std::ldexp(std::trunc(std::ldexp(fraction, significant_bits)),
                    exponent - significant_bits);
}

class OwnedTensor {
 public:
  OwnedTensor() = default;  // absent
  OwnedTensor(DType dtype, Shape shape) : dtype_(dtype), shape_(shape) {
    if (shape.rank > 0) {
      bytes_.resize(static_cast<std::size_t>(shape.num_elements() * size_bytes(dtype)));
      poison();
    }
  }
  // `values` must be representable.
  template <class T>
  OwnedTensor(DType dtype, Shape shape, std::span<const T> values) : OwnedTensor(dtype, shape) {
    for (std::size_t i = 0; i < values.size(); ++i) set(i, static_cast<double>(values[i]));
  }

  ConstTensorView view() const { return {bytes_.data(), dtype_, shape_}; }
  TensorView view() { return {bytes_.data(), dtype_, shape_}; }
  DType dtype() const { return dtype_; }
  const Shape& shape() const { return shape_; }
  bool absent() const { return shape_.rank == 0; }
  std::size_t size() const { return bytes_.size() / static_cast<std::size_t>(size_bytes(dtype_)); }
  const std::vector<std::byte>& bytes() const { return bytes_; }

  void poison() { std::fill(bytes_.begin(), bytes_.end(), std::byte{0xff}); }
  bool untouched() const {
    return std::all_of(bytes_.begin(), bytes_.end(),
                       [](std::byte b) { return b == std::byte{0xff}; });
  }
  void set(std::size_t index, double value) {
    switch (dtype_) {
      case DType::f32: return store(index, static_cast<float>(value));
      case DType::bf16:
        return store(index, static_cast<std::uint16_t>(
                                std::bit_cast<std::uint32_t>(static_cast<float>(value)) >> 16));
      case DType::i32: return store(index, static_cast<std::int32_t>(value));
      case DType::i64: return store(index, static_cast<std::int64_t>(value));
    }
  }
  double get(std::size_t index) const {
    switch (dtype_) {
      case DType::f32: return load<float>(index);
      case DType::bf16:
        return std::bit_cast<float>(std::uint32_t{load<std::uint16_t>(index)} << 16);
      case DType::i32: return load<std::int32_t>(index);
      case DType::i64: return static_cast<double>(load<std::int64_t>(index));
    }
    return 0;
  }
  void append_to(std::vector<double>& out) const {
    for (std::size_t i = 0; i < size(); ++i) out.push_back(get(i));
  }
  std::vector<double> values() const {
    std::vector<double> out;
    append_to(out);
    return out;
  }

 private:
  template <class T>
  void store(std::size_t index, T value) {
    std::memcpy(&bytes_[index * sizeof(T)], &value, sizeof(T));
  }
  template <class T>
  T load(std::size_t index) const {
    T value;
    std::memcpy(&value, &bytes_[index * sizeof(T)], sizeof(T));
    return value;
  }
  DType dtype_ = DType::f32;
  Shape shape_;
  std::vector<std::byte> bytes_;
};

}  // namespace moxie::test
