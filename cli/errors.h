// What ends a verb: Usage (the command line is wrong, exit code 2) or Failure (a file, a check or
// the machine, exit code 1). Both carry one sentence, printed as `moxie: <sentence>`. Errors of the
// library map onto the same two codes.
#pragma once
#include <stdexcept>
#include <string>

#include "moxie/core/error.h"

namespace moxie::cli {

inline constexpr int kExitOk = 0, kExitFailure = 1, kExitUsage = 2;

class Usage : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};
class Failure : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

inline int exit_code(const Error& error) {
  const bool usage =
      error.code() == ErrorCode::invalid_argument || error.code() == ErrorCode::invalid_plan;
  return usage ? kExitUsage : kExitFailure;
}

}  // namespace moxie::cli
