// The built configurations of the stand-alone grouped GEMM: plain and SwiGLU, one CTA or a pair.
#include "moxie/expert/grouped_gemm_launch_cuda.cuh"

namespace moxie::expert {
namespace {

void require(bool holds, const char* rule, int64_t value) {
  if (!holds)
    throw Error(ErrorCode::invalid_argument,
                std::string("grouped GEMM: ") + rule + ", got " + std::to_string(value));
}

void check(const GroupedGemmArguments& x, const GroupedGemmOptions& options) {
  require(x.num_experts >= 1 && x.num_experts <= BandSchedule<1>::kMaxExperts,
          "num_experts must be 1..1024", x.num_experts);
  require(x.n >= 8 && x.n % 8 == 0, "n must be a positive multiple of 8", x.n);
  require(x.k >= 8 && x.k % 8 == 0, "k must be a positive multiple of 8", x.k);
  require(x.rows_capacity >= 0 && x.rows_capacity <= int64_t{65535} * BLOCK_M,
          "rows_capacity must be 0..65535 * 128", x.rows_capacity);
  require(options.cluster_size == 1 || options.cluster_size == 2, "cluster_size must be 1 or 2",
          options.cluster_size);
  require(options.band_blocks >= 0 && options.band_blocks % 2 == 0,
          "band_blocks must be even, or 0", options.band_blocks);
}

template <int kClusterSize, class Epilogue>
void launch(const GroupedGemmArguments& x, const GroupedGemmOptions& options,
            const GroupedGemmWorkspace& workspace, const Epilogue& epilogue, cudaStream_t stream) {
  using Schedule = BandSchedule<kClusterSize>;
  GemmParams<Schedule, AlwaysReady, Epilogue, 1> params{};
  params.operands[0] = describe_operands(x);
  params.epilogue = epilogue;
  params.schedule = describe_schedule<kClusterSize>(x, options);
  params.tickets = reinterpret_cast<TicketCounter*>(workspace.words());
  params.limits = describe_limits(options, workspace);
  launch_gemm_kernel<GemmConfig<kClusterSize>>(params, options.reserve_sms, stream);
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
