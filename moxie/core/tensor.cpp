#include "moxie/core/tensor.h"

namespace moxie {

std::string to_string(const Shape& shape) {
  std::string text = "[";
  for (std::int32_t i = 0; i < shape.rank; ++i) {
    text += (i > 0 ? ", " : "") + std::to_string(shape.dim[static_cast<std::size_t>(i)]);
  }
  return text + "]";
}

}  // namespace moxie
