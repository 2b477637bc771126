// Typed command-line options whose errors are one sentence: the option, the value, the rule, the
// nearest legal value. CLI11 splits the command line and prints the help; the conversion is done
// here, because its own messages say neither the rule nor the way out.
#pragma once
#include <CLI/CLI.hpp>
#include <cstdint>
#include <functional>
#include <limits>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "cli/errors.h"

namespace moxie::cli {

struct Range {
  std::int64_t min = 0;
  std::int64_t max = std::numeric_limits<std::int64_t>::max();
};
inline constexpr Range kInt32{0, std::numeric_limits<std::int32_t>::max()};

// `what` is how the value is called in the error, for instance "--ranks" or "--tokens (rank 2)".
std::int64_t parse_integer(std::string_view what, std::string_view text, Range range);
double parse_real(std::string_view what, std::string_view text, double min);
// The index of `text` in `known`, or Usage with the closest word and the whole list.
std::size_t parse_choice(std::string_view what, std::string_view text,
                         std::span<const std::string_view> known);
std::vector<std::string_view> split(std::string_view text, char separator);

using Store = std::function<void(const std::string&)>;
CLI::Option* add_text(CLI::App& app, const char* name, const char* value_name,
                      const std::string& help, Store store);

template <class Int>
CLI::Option* add_integer(CLI::App& app, const char* name, Int& target, Range range,
                         const std::string& help) {
  return add_text(app, name, "N", help, [&target, name, range](const std::string& text) {
    target = static_cast<Int>(parse_integer(name, text, range));
  });
}

// `known` must outlive the app (static words).
template <class Enum>
CLI::Option* add_choice(CLI::App& app, const char* name, Enum& target,
                        std::span<const std::string_view> known, const std::string& help) {
  std::string value_name;
  for (const auto word : known) value_name += (value_name.empty() ? "" : "|") + std::string(word);
  return add_text(app, name, value_name.c_str(), help,
                  [&target, name, known](const std::string& text) {
                    target = static_cast<Enum>(parse_choice(name, text, known));
                  });
}

// Usage when words are left over that no option or verb takes.
void reject_extras(const CLI::App& app, const std::string& verb);

}  // namespace moxie::cli
