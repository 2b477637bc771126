// Strong index types. A rank, an expert, a block and a route are all small integers; mixing two of
// them up compiles in C and hangs a cluster. Each has its own type here; `.v` is the plain number,
// `Id{n}` the way back.
#pragma once
#include <compare>
#include <cstdint>

#include "moxie/core/hd.h"

namespace moxie {

template <class Tag>
struct Id {
  std::int32_t v = 0;
  constexpr Id() = default;
  MOXIE_HD constexpr explicit Id(std::int64_t value) : v(static_cast<std::int32_t>(value)) {}
  MOXIE_HD friend constexpr bool operator==(Id a, Id b) { return a.v == b.v; }
  MOXIE_HD friend constexpr bool operator<(Id a, Id b) { return a.v < b.v; }
};

using RankId = Id<struct RankTag>;          // 0 .. R-1
using ExpertId = Id<struct ExpertTag>;      // global expert, 0 .. E-1
using LocalExpertId = Id<struct LocalTag>;  // expert on its own rank, 0 .. E_local-1
using BlockId = Id<struct BlockTag>;        // 128 rows of one expert, numbered per rank and pass
using RouteId = Id<struct RouteTag>;        // token * K + slot on the token's home rank

}  // namespace moxie
