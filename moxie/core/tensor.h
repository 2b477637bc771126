// TensorView: a pointer with its dtype and shape, row-major and contiguous. The API takes views so
// that it can say "x of rank 2 is [64, 512] f32, expected [T, 1024] bf16" instead of crashing. A
// default view means "absent".
#pragma once
#include <array>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <type_traits>
#include <vector>

#include "moxie/core/dtype.h"

namespace moxie {

struct Shape {
  std::array<std::int64_t, 3> dim{};
  std::int32_t rank = 0;
  Shape() = default;
  Shape(std::initializer_list<std::int64_t> dims) {
    for (auto d : dims)
      dim[static_cast<std::size_t>(rank++)] = d;  // at most 3 dimensions exist in this API
  }
  std::int64_t num_elements() const {
    std::int64_t n = 1;
    for (std::int32_t i = 0; i < rank; ++i) n *= dim[static_cast<std::size_t>(i)];
    return n;
  }
  friend bool operator==(const Shape&, const Shape&) = default;
};
std::string to_string(const Shape& shape);  // "[64, 512]"

template <class Void>
struct BasicTensorView {
  Void* data = nullptr;
  DType dtype = DType::f32;
  Shape shape;
  BasicTensorView() = default;
  BasicTensorView(Void* data_in, DType dtype_in, Shape shape_in)
      : data(data_in), dtype(dtype_in), shape(shape_in) {}
  template <class T>
  requires(!std::is_void_v<T>) BasicTensorView(T* data_in, Shape shape_in)
      : data(data_in), dtype(dtype_of<std::remove_const_t<T>>()), shape(shape_in) {}
  // A const view can be made of a mutable one, not the other way round.
  template <class Other>
  requires(std::is_const_v<Void>&& std::is_same_v<Other, void>)
      BasicTensorView(const BasicTensorView<Other>& other)
      : data(other.data), dtype(other.dtype), shape(other.shape) {}
  bool absent() const { return shape.rank == 0; }
  template <class T>
  auto* as() const {
    return static_cast<std::conditional_t<std::is_const_v<Void>, const T, T>*>(data);
  }
};
using TensorView = BasicTensorView<void>;
using ConstTensorView = BasicTensorView<const void>;

}  // namespace moxie
