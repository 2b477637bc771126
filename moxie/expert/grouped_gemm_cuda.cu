// The built configurations of the stand-alone grouped GEMM: plain and SwiGLU, one CTA or a pair.
#include "moxie/expert/grouped_gemm_launch_cuda.cuh"

namespace moxie::expert {
namespace {

constexpr const char* kWhat = "grouped GEMM";

void check(const GroupedGemmArguments& x, const GroupedGemmOptions& options) {
  check_launch(kWhat, x.num_experts, x.rows_capacity, options);
  require(x.n >= 8 && x.n % 8 == 0, kWhat, "n must be a positive multiple of 8", x.n);
  require(x.k >= 8 && x.k % 8 == 0, kWhat, "k must be a positive multiple of 8", x.k);
}

template <int kClusterSize, class Epilogue>
void launch(const GroupedGemmArguments& x, const GroupedGemmOptions& options,
            const GroupedGemmWorkspace& workspace, const Epilogue& epilogue, cudaStream_t stream) {
  const GemmOperands operands[1] = {describe_operands(x)};
  launch_products<kClusterSize>(operands, describe_schedule<kClusterSize>(x, options), epilogue,
                                options, workspace, stream);
}

}  // namespace

GroupedGemmWorkspace::GroupedGemmWorkspace() {
  check_cuda(cudaMalloc(&words_, 64), "workspace of the grouped GEMM");
  check_cuda(cudaMemset(words_, 0, 64), "workspace of the grouped GEMM");
  check_cuda(cudaHostAlloc(&record_, sizeof(device::ExpiredWait), cudaHostAllocMapped),
             "wait record");
  *record_ = {};
  check_cuda(cudaHostGetDevicePointer(&device_record_, record_, 0), "wait record");
}

GroupedGemmWorkspace::~GroupedGemmWorkspace() {
  cudaFree(words_);
  cudaFreeHost(record_);
}

void launch_grouped_gemm(const GroupedGemmArguments& x, const GroupedGemmOptions& options,
                         const GroupedGemmWorkspace& workspace, cudaStream_t stream) {
  check(x, options);
  if (x.rows_capacity == 0) return;
  const GemmOutput out = describe_output(x);
  if (x.product == GroupedProduct::plain) {
    const StoreEpilogue<> epilogue{out};
    if (options.cluster_size == 2)
      launch<2>(x, options, workspace, epilogue, stream);
    else
      launch<1>(x, options, workspace, epilogue, stream);
  } else {
    const SwigluEpilogue epilogue{out, x.row_weight};
    if (options.cluster_size == 2)
      launch<2>(x, options, workspace, epilogue, stream);
    else
      launch<1>(x, options, workspace, epilogue, stream);
  }
}

}  // namespace moxie::expert
