// Reader and writer of .npy files. The header is a Python dictionary literal; only its three known
// keys are accepted, and every length is checked before it is used.
#include "cli/npy.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <optional>

#include "cli/errors.h"
#include "cli/files.h"
#include "cli/options.h"
#include "moxie/core/checked.h"

namespace moxie::cli {
namespace {

constexpr std::string_view kMagic("\x93NUMPY", 6);

// Walks over the header text; every expectation that is not met is "the header is not valid at
// ...".
class HeaderReader {
 public:
  HeaderReader(std::string_view text, const std::string& where) : text_(text), where_(where) {}

  [[noreturn]] void fail(const std::string& why) const {
    throw Failure(fmt::format("{}: the .npy header is not valid: {}", where_, why));
  }
  void skip_space() {
    while (!text_.empty() &&
           (text_.front() == ' ' || text_.front() == '\n' || text_.front() == '\t')) {
      text_.remove_prefix(1);
    }
  }
  bool take(char c) {
    skip_space();
    if (text_.empty() || text_.front() != c) return false;
    text_.remove_prefix(1);
    return true;
  }
  void expect(char c) {
    if (!take(c)) fail(fmt::format("'{}' expected before '{}'", c, text_.substr(0, 12)));
  }
  std::string quoted() {
    skip_space();
    const char quote = text_.empty() ? '\0' : text_.front();
    if (quote != '\'' && quote != '"')
      fail(fmt::format("a quoted word expected before '{}'", text_.substr(0, 12)));
    const std::size_t end = text_.find(quote, 1);
    if (end == std::string_view::npos) fail("a quote is not closed");
    const std::string word(text_.substr(1, end - 1));
    text_.remove_prefix(end + 1);
    return word;
  }
  bool boolean() {
    skip_space();
    for (const std::string_view word : {std::string_view("True"), std::string_view("False")}) {
      if (text_.starts_with(word)) {
        text_.remove_prefix(word.size());
        return word == "True";
      }
    }
    fail("'fortran_order' is neither True nor False");
  }
  std::vector<std::int64_t> tuple() {
    std::vector<std::int64_t> extents;
    expect('(');
    while (!take(')')) {
      skip_space();
      std::int64_t extent = -1;
      const auto [end, error] = std::from_chars(text_.data(), text_.data() + text_.size(), extent);
      if (error != std::errc{} || extent < 0) fail("'shape' is not a tuple of whole numbers");
      text_.remove_prefix(static_cast<std::size_t>(end - text_.data()));
      extents.push_back(extent);
      if (!take(',')) {
        expect(')');
        break;
      }
    }
    return extents;
  }

 private:
  std::string_view text_;
  const std::string& where_;
};

struct Header {
  std::optional<std::string> descr;
  std::optional<bool> fortran_order;
  std::optional<std::vector<std::int64_t>> shape;
};

Header parse_header(std::string_view text, const std::string& where) {
  Header header;
  HeaderReader reader(text, where);
  reader.expect('{');
  while (!reader.take('}')) {
    const std::string key = reader.quoted();
    reader.expect(':');
    if (key == "descr") {
      header.descr = reader.quoted();
    } else if (key == "fortran_order") {
      header.fortran_order = reader.boolean();
    } else if (key == "shape") {
      header.shape = reader.tuple();
    } else {
      reader.fail(fmt::format("unknown key '{}'", key));
    }
    if (!reader.take(',')) {
      reader.expect('}');
      break;
    }
  }
  if (!header.descr) reader.fail("'descr' is missing");
  if (!header.fortran_order) reader.fail("'fortran_order' is missing");
  if (!header.shape) reader.fail("'shape' is missing");
  return header;
}

// The item size of "<f4", "|u1", ...; 0 when it is not a plain little-endian number.
std::int64_t item_bytes(std::string_view descr) {
  if (descr.size() < 3 || (descr[0] != '<' && descr[0] != '|' && descr[0] != '=')) return 0;
  std::int64_t size = 0;
  const auto [end, error] = std::from_chars(descr.data() + 2, descr.data() + descr.size(), size);
  return error == std::errc{} && end == descr.data() + descr.size() ? size : 0;
}

}  // namespace

std::string shape_text(const std::vector<std::int64_t>& shape) {
  return fmt::format("[{}]", fmt::join(shape, ", "));
}

NpyArray parse_npy(std::string_view content, const std::string& where) {
  if (content.empty()) throw Failure(fmt::format("{} is empty; a .npy file is needed", where));
  if (!content.starts_with(kMagic.substr(0, std::min(content.size(), kMagic.size())))) {
    throw Failure(fmt::format("{} is not a .npy file: it does not begin with \\x93NUMPY", where));
  }
  const auto truncated = [&](std::size_t needed, std::string_view part) -> Failure {
    return Failure(fmt::format("{} is truncated: its {} needs {} bytes, the file has {}", where,
                               part, needed, content.size()));
  };
  if (content.size() < 10) throw truncated(10, "preamble");
  const auto byte = [&](std::size_t i) {
    return static_cast<std::size_t>(static_cast<unsigned char>(content[i]));
  };
  const std::size_t major = byte(6), minor = byte(7);
  if (major < 1 || major > 3 || minor != 0) {
    throw Failure(fmt::format("{} has .npy version {}.{}; versions 1.0, 2.0 and 3.0 are read",
                              where, major, minor));
  }
  const std::size_t preamble = major == 1 ? 10 : 12;
  if (content.size() < preamble) throw truncated(preamble, "preamble");
  std::size_t header_bytes = byte(8) | byte(9) << 8;
  if (major > 1) header_bytes |= byte(10) << 16 | byte(11) << 24;
  if (content.size() < preamble + header_bytes) throw truncated(preamble + header_bytes, "header");
  Header header = parse_header(content.substr(preamble, header_bytes), where);
  if (*header.fortran_order && header.shape->size() > 1) {
    throw Failure(fmt::format(
        "{} is in Fortran order; C order is needed: save numpy.ascontiguousarray(a)", where));
  }
  std::int64_t num_bytes = item_bytes(*header.descr);
  if (num_bytes <= 0) {
    throw Failure(fmt::format("{} has dtype '{}'; a plain little-endian number type is needed",
                              where, *header.descr));
  }
  for (const std::int64_t extent : *header.shape) num_bytes = mul_or_negative(num_bytes, extent);
  if (num_bytes < 0)
    throw Failure(fmt::format("{} has shape {}, too large", where, shape_text(*header.shape)));
  const std::size_t begin = preamble + header_bytes,
                    needed = begin + static_cast<std::size_t>(num_bytes);
  const std::string data_name =
      fmt::format("data of shape {} dtype '{}'", shape_text(*header.shape), *header.descr);
  if (content.size() < needed) throw truncated(needed, data_name);
  if (content.size() > needed) {
    throw Failure(
        fmt::format("{} has {} bytes behind its {}", where, content.size() - needed, data_name));
  }
  return {*header.descr, *header.shape, std::string(content.substr(begin))};
}

NpyArray read_npy(const std::filesystem::path& path) {
  return parse_npy(read_file(path), path.string());
}

NpyArray read_npy(const std::filesystem::path& path, std::string_view descrs,
                  const std::vector<std::int64_t>& shape) {
  NpyArray array = read_npy(path);
  const std::vector<std::string_view> known = split(descrs, ',');
  if (std::find(known.begin(), known.end(), array.descr) == known.end()) {
    throw Failure(fmt::format("{} has dtype '{}'; '{}' is needed", path.string(), array.descr,
                              fmt::join(known, "' or '")));
  }
  bool fits = array.shape.size() == shape.size();
  for (std::size_t i = 0; fits && i < shape.size(); ++i)
    fits = shape[i] == -1 || shape[i] == array.shape[i];
  if (!fits) {
    throw Failure(fmt::format("{} has shape {}; {} is needed", path.string(),
                              shape_text(array.shape), shape_text(shape)));
  }
  return array;
}

std::string npy_header(std::string_view descr, const std::vector<std::int64_t>& shape) {
  std::string dictionary =
      fmt::format("{{'descr': '{}', 'fortran_order': False, 'shape': ({}{}), }}", descr,
                  fmt::join(shape, ", "), shape.size() == 1 ? "," : "");
  const std::size_t total = static_cast<std::size_t>(align_up(
      static_cast<std::int64_t>(10 + dictionary.size() + 1), 64));  // data starts 64-byte aligned
  dictionary.resize(total - 11, ' ');
  dictionary += '\n';
  std::string header(kMagic);
  header += {'\x01', '\x00', static_cast<char>(dictionary.size() & 0xff),
             static_cast<char>(dictionary.size() >> 8)};
  return header + dictionary;
}

void write_npy(const std::filesystem::path& path, std::string_view descr,
               const std::vector<std::int64_t>& shape, std::string_view bytes) {
  write_file(path, npy_header(descr, shape).append(bytes));
}

}  // namespace moxie::cli
