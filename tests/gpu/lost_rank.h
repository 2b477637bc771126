// What every other rank must say of one that never comes.
#pragma once

#include <gtest/gtest.h>

#include "moxie/moxie.h"

namespace moxie::test {

// All but the lost rank report a wait; whoever was not told by another waited for its inputs.
inline void expect_lost_rank_named(const Error& error, std::int64_t num_ranks, std::int64_t lost) {
  EXPECT_EQ(error.code(), ErrorCode::timeout) << error.what();
  ASSERT_EQ(error.waits().size(), static_cast<std::size_t>(num_ranks - 1)) << error.what();
  int first = 0;
  for (const WaitRecord& wait : error.waits()) {
    SCOPED_TRACE(to_string(wait));
    EXPECT_NE(wait.rank, lost);
    EXPECT_LT(wait.seen, wait.wanted);
    if (wait.told_by >= 0) continue;
    ++first;
    EXPECT_EQ(wait.what, WaitFor::inputs_ready);
    EXPECT_EQ(wait.index, lost);
  }
  EXPECT_GE(first, 1);
}

}  // namespace moxie::test
