#include "python/bindings/arrays.h"

#include <algorithm>

namespace moxie::python {
namespace {

constexpr int kCpu = 1, kCuda = 2, kCudaHost = 3, kCudaManaged = 13;  // DLPack's device types

// A NumPy array of ml_dtypes.bfloat16, which NumPy itself cannot export. Its kind is asked for
// first: the name of a NumPy dtype is put together in Python, microseconds each time.
bool is_numpy_bfloat16(nb::handle array, nb::handle ndarray_type) {
  if (!nb::isinstance(array, ndarray_type)) return false;
  const nb::object dtype = array.attr("dtype");
  if (nb::cast<std::string>(dtype.attr("kind")) != "V") return false;
  return nb::cast<std::string>(nb::str(dtype.attr("name"))) == "bfloat16";
}

bool is_array(nb::handle object) {
  return nb::hasattr(object, "__dlpack__") || nb::hasattr(object, "__array_interface__") ||
         PyObject_CheckBuffer(object.ptr());
}

std::string dtype_words(nb::dlpack::dtype t) {
  using Code = nb::dlpack::dtype_code;
  const char* kind = "type";
  switch (static_cast<Code>(t.code)) {
    case Code::Int: kind = "int"; break;
    case Code::UInt: kind = "uint"; break;
    case Code::Float: kind = "float"; break;
    case Code::Bfloat: kind = "bfloat"; break;
    case Code::Complex: kind = "complex"; break;
    case Code::Bool: return "bool";
    default: break;
  }
  return kind + std::to_string(t.bits);
}

std::string allowed_words(const std::vector<DType>& allowed) {
  std::string text;
  for (std::size_t i = 0; i < allowed.size(); ++i) {
    if (i > 0) text += " or ";
    switch (allowed[i]) {
      case DType::f32: text += "float32"; break;
      case DType::bf16: text += "bfloat16 (of ml_dtypes, or its bits as uint16)"; break;
      case DType::i32: text += "int32"; break;
      case DType::i64: text += "int64"; break;
    }
  }
  return text;
}

bool matches(nb::dlpack::dtype t, DType want) {
  switch (want) {
    case DType::f32: return t == nb::dtype<float>();
    case DType::bf16:
      return t == nb::dtype<std::uint16_t>() ||
             (t.code == static_cast<std::uint8_t>(nb::dlpack::dtype_code::Bfloat) && t.bits == 16);
    case DType::i32: return t == nb::dtype<std::int32_t>();
    case DType::i64: return t == nb::dtype<std::int64_t>();
  }
  return false;
}

[[noreturn]] void fail(const std::string& sentence) {
  throw Error(ErrorCode::invalid_argument, sentence);
}

template <class Get>
std::string list_words(std::size_t n, Get get) {
  std::string text = "[";
  for (std::size_t i = 0; i < n; ++i) text += (i == 0 ? "" : ", ") + std::to_string(get(i));
  return text + "]";
}

// What cannot be imported at all: say which of the reasons it is.
[[noreturn]] void refuse(nb::handle array, const char* name, std::int64_t rank,
                         const std::vector<DType>& allowed, bool writable) {
  if (!is_array(array)) {
    raise("ArgumentTypeError",
          fmt::format("{} of rank {} is of type {}, must be a NumPy array or another array with "
                      "__dlpack__",
                      name, rank, python_type(array)));
  }
  const nb::object flags = nb::getattr(array, "flags", nb::none());
  if (writable && nb::hasattr(flags, "writeable") && !nb::cast<bool>(flags.attr("writeable")))
    fail(fmt::format("{} of rank {} is read-only, must be writable: results go there", name, rank));
  const nb::object dtype = nb::getattr(array, "dtype", nb::none());
  fail(fmt::format("{} of rank {} is an array of type {}, must be {} in native byte order{}", name,
                   rank, nb::cast<std::string>(nb::str(dtype)), allowed_words(allowed),
                   writable ? " and writable" : ""));
}

template <class Ndarray>
TensorView checked(const Ndarray& a, const char* name, std::int64_t rank,
                   const std::vector<DType>& allowed, bool on_cuda) {
  const auto shape = [&] {
    return list_words(a.ndim(), [&](std::size_t i) { return a.shape(i); });
  };
  const auto want =
      std::find_if(allowed.begin(), allowed.end(), [&](DType t) { return matches(a.dtype(), t); });
  if (want == allowed.end()) {
    fail(fmt::format("{} of rank {} is {} {}, must be {}", name, rank, shape(),
                     dtype_words(a.dtype()), allowed_words(allowed)));
  }
  if (a.ndim() < 1 || a.ndim() > 3)
    fail(
        fmt::format("{} of rank {} has {} dimensions, must have between 1 and 3; nearest legal "
                    "value {}",
                    name, rank, a.ndim(), a.ndim() < 1 ? 1 : 3));
  const int device = a.device_type();
  if (on_cuda ? device != kCuda && device != kCudaManaged : device != kCpu && device != kCudaHost) {
    fail(fmt::format("{} of rank {} is in {} memory, must be in {} memory: the World is {}", name,
                     rank,
                     device == kCpu    ? "CPU"
                     : device == kCuda ? "CUDA"
                                       : "another device's",
                     on_cuda ? "CUDA" : "CPU", on_cuda ? "World.cuda" : "World.cpu"));
  }
  std::int64_t stride = 1;
  for (std::size_t i = a.ndim(); i-- > 0;) {
    if (a.size() > 0 && a.shape(i) != 1 && a.stride(i) != stride) {
      const std::string seen = list_words(a.ndim(), [&](std::size_t k) { return a.stride(k); });
      fail(
          fmt::format("{} of rank {} is {} with strides {} (in elements), must be C-contiguous; "
                      "numpy.ascontiguousarray makes such a copy",
                      name, rank, shape(), seen));
    }
    stride *= static_cast<std::int64_t>(a.shape(i));
  }
  auto* data = const_cast<void*>(static_cast<const void*>(a.data()));
  require_element_aligned(data, *want, name, rank);
  TensorView view;
  view.data = data;
  view.dtype = *want;
  view.shape.rank = static_cast<std::int32_t>(a.ndim());
  for (std::size_t i = 0; i < a.ndim(); ++i)
    view.shape.dim[i] = static_cast<std::int64_t>(a.shape(i));
  return view;
}

}  // namespace

void raise(const char* class_name, const std::string& sentence) {
  const nb::object type = nb::module_::import_("moxie._errors").attr(class_name);
  PyErr_SetObject(type.ptr(), type(sentence).ptr());
  throw nb::python_error();
}

void require_element_aligned(const void* data, DType dtype, const char* name, std::int64_t rank) {
  const auto align = static_cast<std::uintptr_t>(size_bytes(dtype));
  if (reinterpret_cast<std::uintptr_t>(data) % align == 0) return;
  fail(
      fmt::format("{} of rank {} begins at an address that is no multiple of {} bytes, must be "
                  "aligned; numpy.require(array, requirements='A') makes such a copy",
                  name, rank, align));
}

void Overlaps::add(std::vector<Span>& spans, const ConstTensorView& view, const char* name,
                   std::int64_t rank) {
  const auto* begin = static_cast<const std::byte*>(view.data);
  const std::int64_t num_bytes = view.shape.num_elements() * size_bytes(view.dtype);
  if (num_bytes > 0) spans.push_back({begin, begin + num_bytes, name, rank});
}
void Overlaps::reads(const ConstTensorView& view, const char* name, std::int64_t rank) {
  add(inputs_, view, name, rank);
}
void Overlaps::writes(const TensorView& view, const char* name, std::int64_t rank) {
  add(outputs_, view, name, rank);
}

void Overlaps::check() {
  std::sort(outputs_.begin(), outputs_.end(),
            [](const Span& a, const Span& b) { return a.begin < b.begin; });
  const auto refuse_pair = [](const Span& a, const Span& b) {
    fail(
        fmt::format("{} of rank {} shares memory with {} of rank {}, must have memory of its own: "
                    "a pass writes results while it reads inputs",
                    a.name, a.rank, b.name, b.rank));
  };
  for (std::size_t i = 1; i < outputs_.size(); ++i)
    if (outputs_[i - 1].end > outputs_[i].begin) refuse_pair(outputs_[i - 1], outputs_[i]);
  for (const Span& in : inputs_) {
    // Outputs are disjoint and sorted: only the last that begins before in.end can reach into it.
    const auto after =
        std::lower_bound(outputs_.begin(), outputs_.end(), in.end,
                         [](const Span& o, const std::byte* at) { return o.begin < at; });
    if (after != outputs_.begin() && std::prev(after)->end > in.begin)
      refuse_pair(*std::prev(after), in);
  }
}

PassArrays::PassArrays(bool on_cuda)
    : on_cuda_(on_cuda), ndarray_type_(nb::module_::import_("numpy").attr("ndarray")) {}

TensorView PassArrays::take(nb::handle array, const char* name, std::int64_t rank,
                            const std::vector<DType>& allowed, bool writable) {
  if (array.is_none()) return {};
  nb::object bits = nb::borrow(array);
  if (is_numpy_bfloat16(array, ndarray_type_)) {
    if (std::find(allowed.begin(), allowed.end(), DType::bf16) == allowed.end()) {
      const auto shape = nb::cast<std::string>(nb::str(nb::list(array.attr("shape"))));
      fail(fmt::format("{} of rank {} is {} bfloat16, must be {}", name, rank, shape,
                       allowed_words(allowed)));
    }
    bits = array.attr("view")("uint16");
  }
  TensorView view;
  if (writable) {
    nb::ndarray<> a;
    if (!nb::try_cast<nb::ndarray<>>(bits, a, false)) refuse(array, name, rank, allowed, true);
    view = checked(a, name, rank, allowed, on_cuda_);
    written_.push_back(std::move(a));
  } else {
    nb::ndarray<nb::ro> a;
    if (!nb::try_cast<nb::ndarray<nb::ro>>(bits, a, false))
      refuse(array, name, rank, allowed, false);
    view = checked(a, name, rank, allowed, on_cuda_);
    read_.push_back(std::move(a));
  }
  if (writable)
    overlaps_.writes(view, name, rank);
  else
    overlaps_.reads(view, name, rank);
  return view;
}

ConstTensorView PassArrays::read(nb::handle array, const char* name, std::int64_t rank,
                                 const std::vector<DType>& allowed) {
  return take(array, name, rank, allowed, false);
}
TensorView PassArrays::write(nb::handle array, const char* name, std::int64_t rank,
                             const std::vector<DType>& allowed) {
  return take(array, name, rank, allowed, true);
}

std::vector<nb::object> per_rank(nb::handle list, const char* name, std::int64_t num_ranks) {
  const bool is_list = nb::isinstance<nb::list>(list) || nb::isinstance<nb::tuple>(list);
  if (!is_list) {
    raise("ArgumentTypeError",
          fmt::format("{} is of type {}, must be a list with one entry for each of {} ranks", name,
                      python_type(list), num_ranks));
  }
  std::vector<nb::object> entries;
  for (const nb::handle entry : list) entries.push_back(nb::borrow(entry));
  if (static_cast<std::int64_t>(entries.size()) != num_ranks) {
    fail(fmt::format(
        "{} has {} entries, must have one per rank of this process; nearest legal value {}", name,
        entries.size(), num_ranks));
  }
  return entries;
}

nb::object empty_array(const Shape& shape, nb::handle like, const char* name) {
  nb::list dims;
  for (std::int32_t i = 0; i < shape.rank; ++i) dims.append(shape.dim[static_cast<std::size_t>(i)]);
  const nb::object numpy = nb::module_::import_("numpy");
  if (like.is_none()) return numpy.attr("empty")(dims, "float32");
  if (!nb::isinstance(like, numpy.attr("ndarray"))) {
    raise("ArgumentTypeError",
          fmt::format("{} is not given and its input is of type {}, must be given in out: only "
                      "NumPy arrays are allocated here",
                      name, python_type(like)));
  }
  return numpy.attr("empty")(dims, like.attr("dtype"));
}

}  // namespace moxie::python
