// The device records shipped inside the binary. The array is generated at build time from
// moxie/planner/*.json (CMakeLists.txt, embedded.cpp.in).
#pragma once
#include <span>
#include <string_view>

namespace moxie::planner {

struct EmbeddedFile {
  std::string_view name, text;
};
std::span<const EmbeddedFile> embedded_devices();

}  // namespace moxie::planner
