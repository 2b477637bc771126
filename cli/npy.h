// The .npy format (NumPy's array files), versions 1.0 to 3.0, C order: the interchange format of
// dumps and inputs. Own reader, because its errors are to say which file, what is wrong and what
// was expected. docs/dump-format.md tells how dtypes map; BF16 is stored as '<u2' in files named
// *.bf16.npy, since NumPy has no such type.
#pragma once
#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

namespace moxie::cli {

struct NpyArray {
  std::string descr;                // "<f4", "<u2", "<i4", "<i8", ...
  std::vector<std::int64_t> shape;  // [] is a scalar
  std::string bytes;                // row-major, little-endian
};

// "[512, 4]"
std::string shape_text(const std::vector<std::int64_t>& shape);

// `where` names the file in errors. Throws Failure.
NpyArray parse_npy(std::string_view content, const std::string& where);
NpyArray read_npy(const std::filesystem::path& path);
// Reads and insists on one of the dtypes (comma-separated descr list) and the shape; -1 in `shape`
// fits any extent.
NpyArray read_npy(const std::filesystem::path& path, std::string_view descrs,
                  const std::vector<std::int64_t>& shape);

std::string npy_header(std::string_view descr,
                       const std::vector<std::int64_t>& shape);  // version 1.0, 64-byte aligned
void write_npy(const std::filesystem::path& path, std::string_view descr,
               const std::vector<std::int64_t>& shape, std::string_view bytes);

}  // namespace moxie::cli
