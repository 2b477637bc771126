// Checks that a call throws Error with a code, and that its sentence holds every given word: a
// reader must find the tensor, the value seen and the legal value there.
#pragma once
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "moxie/core/error.h"

namespace moxie::test {

template <class Call>
void expect_error(ErrorCode code, const std::vector<std::string>& words, Call&& call) {
  try {
    call();
  } catch (const Error& error) {
    EXPECT_EQ(name(error.code()), std::string(name(code))) << error.what();
    for (const std::string& word : words) {
      EXPECT_NE(std::string(error.what()).find(word), std::string::npos)
          << "'" << word << "' is missing in: " << error.what();
    }
    return;
  }
  ADD_FAILURE() << "no Error, expected " << name(code);
}

}  // namespace moxie::test
