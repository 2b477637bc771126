// Sentences of errors in files that nvcc compiles: its front end does not take fmt 9.
#pragma once

#include <cstddef>
#include <sstream>
#include <string>
#include <string_view>

#include "moxie/core/error.h"

namespace moxie::backend_cuda {

// `pattern` with each {} replaced by the next value.
template <class... Values>
std::string sentence(std::string_view pattern, const Values&... values) {
  std::ostringstream out;
  const auto append = [&](const auto& value) {
    const std::size_t brace = pattern.find("{}");
    out << pattern.substr(0, brace) << value;
    pattern.remove_prefix(brace + 2);
  };
  (append(values), ...);
  out << pattern;
  return out.str();
}

[[noreturn]] inline void unavailable(const std::string& sentence) {
  throw Error(ErrorCode::unavailable, sentence);
}

}  // namespace moxie::backend_cuda
