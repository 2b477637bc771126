// The built configurations of the fused backward kernel.
#include "moxie/backend_cuda/fused_backward.cuh"

namespace moxie::backend_cuda {
namespace {

template <bool kGeneral, int kNumLocalRanks, int kClusterSize>
FusedKernel built() {
  return {
      reinterpret_cast<const void*>(&fused_backward_kernel<kGeneral, kNumLocalRanks, kClusterSize>),
      sizeof(BackwardShared)};
}

template <bool kGeneral, int kNumLocalRanks>
FusedKernel with_cluster(int cluster_size) {
  return cluster_size == 2 ? built<kGeneral, kNumLocalRanks, 2>()
                           : built<kGeneral, kNumLocalRanks, 1>();
}

}  // namespace

FusedKernel backward_kernel(bool general, bool several_ranks, int cluster_size) {
  if (several_ranks) {
    return general ? with_cluster<true, kMaxLocalRanks>(cluster_size)
                   : with_cluster<false, kMaxLocalRanks>(cluster_size);
  }
  return general ? with_cluster<true, 1>(cluster_size) : with_cluster<false, 1>(cluster_size);
}

}  // namespace moxie::backend_cuda
