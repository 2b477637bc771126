// Moxie's public C++ API: Problem, Plan, World, Layer, Context. All a C++ user includes.
//
//   moxie::World world = moxie::World::cpu({.num_ranks = 4});
//   moxie::Layer layer(world, problem);                           // plan chosen and proven here
//   moxie::Context ctx = layer.forward(inputs, outputs);          // one entry per rank
//   layer.backward(ctx, grad_inputs, grad_outputs);               // ctx is const: call it as often
//   as you like
//
// Every tensor is row-major and contiguous; T is that rank's number of tokens (0 allowed, different
// per rank). Errors are moxie::Error (core/error.h). Nothing is allocated inside a pass.
#pragma once
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "moxie/core/error.h"
#include "moxie/core/host_gemm.h"
#include "moxie/core/machine.h"
#include "moxie/core/problem.h"
#include "moxie/core/tensor.h"
#include "moxie/pipeline/plan.h"
#include "moxie/trace/trace.h"

namespace moxie {

// Weights of one rank. dtype = problem.dtype throughout. Absent where the problem has no such part.
struct Weights {
  ConstTensorView gate, up;                // [E_local, I, H]
  ConstTensorView down;                    // [E_local, H, I]
  ConstTensorView gate_bias, up_bias;      // [E_local, I]
  ConstTensorView down_bias;               // [E_local, H]
  ConstTensorView shared_gate, shared_up;  // [I_s, H]
  ConstTensorView shared_down;             // [H, I_s]
  ConstTensorView shared_output_gate;      // [H]
};

struct ForwardInput {
  ConstTensorView x;              // [T, H]
  ConstTensorView expert_ids;     // [T, K] i32 or i64; -1 = no route
  ConstTensorView route_weights;  // [T, K] f32; not read where the id is -1
  Weights weights = {};
};
struct ForwardOutput {
  TensorView y;  // [T, H]
};

// Gradients of one rank's weights. Matrices are f32 or problem.dtype, all alike; vectors (biases,
// output gate) are f32.
struct WeightGrads {
  bool accumulate =
      false;  // add into what is there (f32 main-grad); else overwrite, zeros for idle experts
  TensorView gate, up;                // [E_local, I, H]
  TensorView down;                    // [E_local, H, I]
  TensorView gate_bias, up_bias;      // [E_local, I] f32
  TensorView down_bias;               // [E_local, H] f32
  TensorView shared_gate, shared_up;  // [I_s, H]
  TensorView shared_down;             // [H, I_s]
  TensorView shared_output_gate;      // [H] f32
};
struct BackwardInput {
  ConstTensorView x;   // [T, H] the same values as in forward
  ConstTensorView dy;  // [T, H]
  Weights weights;     // the same values as in forward
};
struct BackwardOutput {
  TensorView dx;               // [T, H]
  TensorView d_route_weights;  // [T, K] f32; 0 where the id is -1
  WeightGrads grads = {};
};

// Faults a test can inject. The defaults inject nothing.
struct FaultInjection {
  std::uint64_t shuffle_seed =
      0;  // != 0: seeded random yields and delays before every protocol step
  std::int32_t max_delay_us = 20;  // upper end of a shuffled delay
  bool poison_workspace = false;   // fill every buffer with 0xFF before each pass
  std::int32_t late_rank = -1;     // this rank starts each pass late_ms later
  std::int32_t late_ms = 0;
  std::int32_t kill_rank = -1;  // a worker of this rank ends silently ...
  Role kill_role = Role::compute;
  std::int32_t kill_worker = 0;
  std::int32_t kill_after_steps = 0;  // ... after so many protocol steps
  std::int32_t back_to_back = 1;  // CPU: passes per call; no rank waits for another between them
  bool keep_schedule = false;  // CUDA, forward, to measure what it saves: nothing is staged, sorted
                               // or agreed on, the tables of the layer's last pass hold. Right only
                               // if every rank's inputs are those of then
  bool skip_merge = false;     // CUDA, forward, to measure what it costs: y is not written
};

struct WorldOptions {
  std::int64_t num_ranks = 1;
  double timeout_s = 300.0;  // bound of every wait; 0 = unbounded
  bool validate_finite =
      false;  // check activations, weights and gradients for NaN and infinity before each pass
  HostGemm gemm = HostGemm::automatic;
  FaultInjection faults = {};
  std::string plan_cache = {};  // file of tuned plans, "off": none; empty: MOXIE_PLAN_CACHE, else
                                // moxie/plans.json in the user's cache folder
};

// Where the ranks of a CUDA world run.
struct CudaOptions {
  std::vector<int> devices;  // one per rank; a device named twice holds virtual ranks. Empty: rank
                             // r on device r mod count
  std::int32_t reserve_sms = 0;  // SMs of each GPU left to other kernels
  std::int32_t cluster_size =
      0;  // 2: pairs of CTAs share weights (slabs order), 1: none; 0: by rows per expert
};

// Which rank of a world of processes this one is.
struct ProcessOptions {
  std::int64_t rank = 0;
  std::string name;  // the same on every rank, of no other world that is just being made
};

// SMs that a world of processes leaves free by default. Another library's kernel that waits for its
// own peers (an all-reduce on another stream) may hold SMs of one GPU while our pass holds those of
// another, and then both wait for ever. 32 is what NCCL's collectives take at most by default, one
// SM for each of their CTAs. 0 is right where no such kernel runs beside a pass.
inline constexpr std::int32_t kReserveBesidePeers = 32;

// One rank of a world whose ranks each have a GPU and a process (or thread) of their own.
struct NcclOptions {
  std::int64_t rank = 0;
  std::string unique_id = {};  // nccl_unique_id() of one rank, brought to all; serves one World
  void* comm = nullptr;  // instead of an id: an ncclComm_t of exactly this World's ranks, in their
                         // order; only needed while the World is made
  int device = -1;       // -1: the current one
  std::int32_t reserve_sms = kReserveBesidePeers;  // SMs left to other kernels
  std::int32_t cluster_size = 0;                   // as in CudaOptions
  std::string library = {};  // NCCL's file; empty: MOXIE_NCCL_LIBRARY, else the NCCL that the
                             // process has loaded, else libnccl.so.2
};

// 128 bytes by which the ranks of one World find each other. Needs NCCL, but no GPU. The process
// that called it must live until the World is made.
std::string nccl_unique_id(const std::string& library = {});

// Ranks whose tensors this process brings to a pass.
struct RankRange {
  std::int64_t begin = 0, count = 0;
};

class Backend;

// The ranks that can see each other's memory. Move-only; outlives its layers. One pass at a time.
class World {
 public:
  static World cpu(const WorldOptions& options);
  // One process per rank, on this machine. World(), Layer() and reset() wait until all ranks have
  // called them; a pass takes this rank's tensors only (spans of one entry).
  static World cpu_process(const WorldOptions& options, const ProcessOptions& process);
  // One kernel per GPU and pass. Tensors are device pointers; passes are enqueued and return at
  // once.
  static World cuda(const WorldOptions& options, const CudaOptions& cuda = {});
  // The same with one GPU per rank, every rank in a process (or a thread) of its own; the GPUs are
  // of one NVLink domain. The ranks find each other by an id from any of them, over a file or
  // store of the caller's; several Worlds, of other ranks each, are sub-groups of a larger job.
  // World(), Layer() and reset() wait until all ranks have called them, and throw on every rank
  // when one does not come within timeout_s or brings something else.
  static World nccl(const WorldOptions& options, const NcclOptions& nccl);
  World(World&&) noexcept;
  World& operator=(World&&) noexcept;
  ~World();

  std::int64_t num_ranks() const;
  RankRange local_ranks() const;  // of this process; all of them but in a world of processes
  bool stopped() const;           // a pass timed out; further passes throw world_stopped
  void reset();                   // clears signals and counters; legal whenever no pass runs
  void set_timeout(double seconds);
  void set_faults(const FaultInjection& faults);
  // CUDA: the cudaStream_t of rank 0's GPU that passes are ordered on; the other GPUs follow it.
  // CPU: no effect.
  void set_stream(void* stream);
  // Waits for the passes enqueued and throws the Error of the last one. CPU passes have thrown
  // theirs already.
  void synchronize();
  std::string describe_gemm() const;  // "oneDNN 2.6.3, rows padded to 16", "plain loops"
  MachineId machine() const;          // what plans are chosen and cached for
  Backend& backend() { return *backend_; }

 private:
  explicit World(std::unique_ptr<Backend> backend);
  std::unique_ptr<Backend> backend_;
};

struct ContextState;
// What backward needs of one forward pass: routes, weights and, by the plan's SavePolicy, z and x
// rows. Const after forward; several may be alive; reusable through forward(inputs, outputs,
// context).
class Context {
 public:
  Context(Context&&) noexcept;
  Context& operator=(Context&&) noexcept;
  ~Context();
  std::int64_t num_bytes() const;  // over all ranks

 private:
  friend class Layer;
  explicit Context(std::unique_ptr<ContextState> state);
  std::unique_ptr<ContextState> state_;
};

struct BufferBytes {
  std::string name;        // "heap.x_in", "forward.hidden_ring", ..., last "total"
  std::int64_t num_bytes;  // per rank
};

class Layer {
 public:
  // Throws invalid_argument or invalid_plan. A zero in `plan` means "choose". Without a plan: the
  // one that `moxie tune` stored for this problem and machine, else the planner's where it is sure,
  // else pipeline::default_plan; plan_source() says which.
  Layer(World& world, const Problem& problem, const Plan& plan);
  Layer(World& world, const Problem& problem);
  Layer(Layer&&) noexcept;
  ~Layer();

  const Problem& problem() const;
  const Plan& plan() const;  // resolved: no zeros left but that of comm_workers
  const PlanSource& plan_source() const;

  // One entry per rank of this process. `trace`, when given, receives the timeline of this pass.
  Context forward(std::span<const ForwardInput> inputs, std::span<const ForwardOutput> outputs,
                  trace::Trace* trace = nullptr);
  void forward(std::span<const ForwardInput> inputs, std::span<const ForwardOutput> outputs,
               Context& context, trace::Trace* trace = nullptr);
  // Forward only: nothing is saved.
  void infer(std::span<const ForwardInput> inputs, std::span<const ForwardOutput> outputs,
             trace::Trace* trace = nullptr);
  void backward(const Context& context, std::span<const BackwardInput> inputs,
                std::span<const BackwardOutput> outputs, trace::Trace* trace = nullptr);

  // World::cpu_process: this rank will not run the pass that its peers run; each of them throws
  // invalid_argument, "rank 1 refused: " and `why`, when it comes to it, and all go on with the
  // pass after it. Waits for nobody but those who are still to come to a pass refused before.
  // forward, infer and backward do so themselves with arguments that break a rule; it is for those
  // who check more before. Other worlds: no effect.
  void refuse(const std::string& why);

  // [T_max, H] of the rank's heap, where a pass puts x for its peers to read. A pass whose input.x
  // points there (T rows from its beginning, forward or backward) makes no copy and leaves them as
  // they are; a pass of this layer with another x, or any pass of another layer of the world,
  // overwrites them. It moves when a layer that needs a larger heap (larger H, T_max, K or E) is
  // made in the same world, and only then: ask again. CUDA: device memory of the rank's GPU, to be
  // written in stream order.
  TensorView input_buffer(std::int64_t rank) const;

  Context make_context() const;
  // Every buffer of one rank, as asked for (CUDA rounds each allocation up, to 2 MiB at most), and
  // their "total": heap, workspace and, on CUDA, what the world needs beside the heap and what
  // traced passes have recorded into. It is less than the sum, since forward and backward share
  // addresses. Contexts tell their bytes themselves. The heap is there once per world, as large as
  // its largest layer needs.
  std::vector<BufferBytes> memory() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

std::string version();

}  // namespace moxie
