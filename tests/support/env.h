// What a test run can be told from outside, all environment variables in one place:
//   MOXIE_TEST_SEED    reruns a random test with the same inputs (every test prints its seed)
//   MOXIE_TEST_PASSES  number of shuffled passes of test_protocol
//   MOXIE_TEST_GEMM    automatic | onednn | plain
//   MOXIE_TEST_LATE_MS how late the late rank of a GPU test comes
#pragma once
#include <cstdint>

#include "moxie/moxie.h"

namespace moxie::test {

// The seed of this process: fresh unless MOXIE_TEST_SEED says otherwise. The first call of each
// test prints the command that reruns it.
std::uint64_t test_seed();

std::int64_t num_passes(std::int64_t fallback);
std::int32_t late_ms(std::int32_t fallback);

// Options of a test world: poisoned workspace, and waits that give up long before the test runner
// does. `make_world` is the one place where tests choose a backend.
WorldOptions world_options(std::int64_t num_ranks);
World make_world(const WorldOptions& options);

}  // namespace moxie::test
