// Conversion of option values, and the sentences for what cannot be converted.
#include "cli/options.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <charconv>
#include <cmath>

#include "moxie/core/problem.h"

namespace moxie::cli {

std::int64_t parse_integer(std::string_view what, std::string_view text, Range range) {
  std::int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  const bool whole = end == text.data() + text.size() && !text.empty();
  if (error == std::errc::result_out_of_range && whole) {
    throw Usage(fmt::format("{} is {}; it must be at most {}", what, text, range.max));
  }
  if (error != std::errc{} || !whole) {
    throw Usage(fmt::format("{} is '{}'; it must be a whole number, for example {}", what, text,
                            std::max<std::int64_t>(range.min, 4)));
  }
  if (value < range.min) {
    throw Usage(fmt::format("{} is {}; it must be at least {}, the nearest legal value", what,
                            value, range.min));
  }
  if (value > range.max) {
    throw Usage(fmt::format("{} is {}; it must be at most {}, the nearest legal value", what, value,
                            range.max));
  }
  return value;
}

double parse_real(std::string_view what, std::string_view text, double min) {
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || end != text.data() + text.size() || !std::isfinite(value)) {
    throw Usage(fmt::format("{} is '{}'; it must be a number, for example 1.5", what, text));
  }
  if (value < min) {
    throw Usage(
        fmt::format("{} is {}; it must be at least {}, the nearest legal value", what, value, min));
  }
  return value;
}

std::size_t parse_choice(std::string_view what, std::string_view text,
                         std::span<const std::string_view> known) {
  for (std::size_t i = 0; i < known.size(); ++i) {
    if (known[i] == text) return i;
  }
  throw Usage(fmt::format("{} is '{}'; it must be one of {}; did you mean '{}'?", what, text,
                          fmt::join(known, ", "), closest(text, known)));
}

std::vector<std::string_view> split(std::string_view text, char separator) {
  std::vector<std::string_view> parts;
  for (;;) {
    const std::size_t at = text.find(separator);
    parts.push_back(text.substr(0, at));
    if (at == std::string_view::npos) return parts;
    text.remove_prefix(at + 1);
  }
}

CLI::Option* add_text(CLI::App& app, const char* name, const char* value_name,
                      const std::string& help, Store store) {
  // Given twice, the last one counts: a script can append to a command line.
  return app.add_option_function<std::string>(name, store, help)
      ->type_name(value_name)
      ->take_last();
}

void reject_extras(const CLI::App& app, const std::string& verb) {
  const std::vector<std::string> extras = app.remaining();
  if (extras.empty()) return;
  const std::string word = extras.front().substr(0, extras.front().find('='));
  if (!word.starts_with("-")) {
    throw Usage(fmt::format("`{}` takes no argument '{}'; see `{} --help`", verb, word, verb));
  }
  std::vector<std::string> names;
  for (const CLI::Option* option : app.get_options())
    names.push_back("--" + option->get_single_name());
  const std::vector<std::string_view> known(names.begin(), names.end());
  throw Usage(fmt::format("`{}` has no option {}; did you mean {}? (`{} --help` lists them)", verb,
                          word, closest(word, known), verb));
}

}  // namespace moxie::cli
