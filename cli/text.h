// Real input without a model: any text file becomes activations. Each byte gets a random vector,
// mixed with those of the seven bytes before it and with its position, so that equal bytes in
// different words differ, frequent ones stay alike, and a router that looks at the result is skewed
// the way language is.
#pragma once
#include <cstdint>
#include <span>
#include <string>

#include "cli/tensors.h"

namespace moxie::cli {

struct Text {
  std::string name;   // as shown to people
  std::string bytes;  // never empty
};
Text load_text(const std::string& path);  // throws Failure when missing or empty
// README.md of the source tree or of the installation, found from where the program lies; else a
// short built-in text.
Text default_text();

// Fills x of every rank: token t of all tokens (rank after rank) is byte t of the text, which
// starts again at its end.
void embed_text(const Text& text, const Problem& problem, std::uint64_t seed,
                std::span<RankTensors> ranks);

}  // namespace moxie::cli
