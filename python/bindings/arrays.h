// Arrays of the caller as the library sees them. NumPy arrays and everything with DLPack come in
// without a copy; what cannot be used as it is (dtype, strides, device, read-only) is refused with
// one sentence. Nothing here decides shapes: the library checks those.
#pragma once
#include <nanobind/ndarray.h>

#include <string>
#include <vector>

#include "python/bindings/module.h"

namespace moxie::python {

// Raises a class of moxie._errors that no C++ ErrorCode stands for.
[[noreturn]] void raise(const char* class_name, const std::string& sentence);

// Throws unless `data` is a multiple of the size of its elements.
void require_element_aligned(const void* data, DType dtype, const char* name, std::int64_t rank);

// Results may overlap neither each other nor what the pass reads: it writes while it reads.
class Overlaps {
 public:
  void reads(const ConstTensorView& view, const char* name, std::int64_t rank);
  void writes(const TensorView& view, const char* name, std::int64_t rank);
  void check();

 private:
  struct Span {
    const std::byte *begin, *end;
    const char* name;
    std::int64_t rank;
  };
  static void add(std::vector<Span>& spans, const ConstTensorView& view, const char* name,
                  std::int64_t rank);
  std::vector<Span> inputs_, outputs_;
};

// The arrays of one pass: their views for the library, and the references that keep them alive.
class PassArrays {
 public:
  explicit PassArrays(bool on_cuda);

  // `name` and `rank` are for sentences. None gives an absent view.
  ConstTensorView read(nb::handle array, const char* name, std::int64_t rank,
                       const std::vector<DType>& allowed);
  TensorView write(nb::handle array, const char* name, std::int64_t rank,
                   const std::vector<DType>& allowed);
  void check_overlaps() { overlaps_.check(); }

 private:
  TensorView take(nb::handle array, const char* name, std::int64_t rank,
                  const std::vector<DType>& allowed, bool writable);

  bool on_cuda_;
  nb::object ndarray_type_;  // numpy.ndarray
  std::vector<nb::ndarray<nb::ro>> read_;
  std::vector<nb::ndarray<>> written_;
  Overlaps overlaps_;
};

// The entries of a list or tuple with one entry per rank.
std::vector<nb::object> per_rank(nb::handle list, const char* name, std::int64_t num_ranks);

// An uninitialised NumPy array. `like` is the caller's array whose element type it takes (float32
// when None); an array of another library raises, because only NumPy's are allocated here.
nb::object empty_array(const Shape& shape, nb::handle like, const char* name);

}  // namespace moxie::python
