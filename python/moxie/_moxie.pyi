"""Bindings of Moxie's C++ library; use the package moxie."""

from collections.abc import Sequence
import enum
from typing import Any

import moxie._weights


class ErrorCode(enum.Enum):
    """What kind of rule was broken; every `Error` has one."""

    invalid_argument = 0
    """a size, dtype or array breaks a rule"""

    invalid_plan = 1
    """a plan that could deadlock or does not fit"""

    invalid_route = 2
    """an expert id outside -1 .. E-1"""

    non_finite = 3
    """validation found a NaN or an infinity"""

    capacity_exceeded = 4
    """more rows for a rank than the plan's capacity"""

    timeout = 5
    """a bounded wait expired; see `Error.waits`"""

    world_stopped = 6
    """a pass on a World that has timed out and was not reset"""

    unavailable = 7
    """a backend that this build does not have"""

class Role(enum.Enum):
    """The two kinds of workers of a rank."""

    comm = 0

    compute = 1

class WaitRecord:
    """What a worker waited for when its wait gave up."""

    @property
    def rank(self) -> int: ...

    @property
    def role(self) -> Role: ...

    @property
    def worker(self) -> int: ...

    @property
    def what(self) -> str: ...

    @property
    def index(self) -> int: ...

    @property
    def wanted(self) -> int: ...

    @property
    def seen(self) -> int: ...

    @property
    def epoch(self) -> int: ...

    @property
    def told_by(self) -> int:
        """-1: its own clock ran out; else the first rank"""

    def __repr__(self) -> str: ...

class DType(enum.Enum):
    """Storage types. Sums are in float32 whatever is stored."""

    f32 = 0

    bf16 = 1

    i32 = 2
    """expert ids only"""

    i64 = 3
    """expert ids only"""

class ActivationKind(enum.Enum):
    """g and u are a row's gate and up products."""

    swiglu = 0
    """silu(g) * u"""

    swiglu_clamped = 1
    """g' = min(g, limit), u' = clamp(u, -limit, limit); silu(g') * u'"""

    gpt_oss = 2
    """the same clamps; g' * sigmoid(alpha g') * (u' + 1)"""

class Activation:
    """The expert's activation and its constants."""

    def __init__(self, *, kind: ActivationKind = ActivationKind.swiglu, limit: float = 7.0, alpha: float = 1.7020000219345093) -> None: ...

    @property
    def kind(self) -> ActivationKind: ...

    @kind.setter
    def kind(self, arg: ActivationKind, /) -> None: ...

    @property
    def limit(self) -> float:
        """clamp of swiglu_clamped and gpt_oss"""

    @limit.setter
    def limit(self, arg: float, /) -> None: ...

    @property
    def alpha(self) -> float:
        """gpt_oss only"""

    @alpha.setter
    def alpha(self, arg: float, /) -> None: ...

    def __eq__(self, other: object, /) -> bool: ...

    def __repr__(self) -> str: ...

class SharedExpert:
    """An expert that every token of the rank visits."""

    def __init__(self, *, intermediate: int = 0, output_gate: bool = False) -> None: ...

    @property
    def intermediate(self) -> int:
        """0: no shared expert"""

    @intermediate.setter
    def intermediate(self, arg: int, /) -> None: ...

    @property
    def output_gate(self) -> bool:
        """multiply its output by sigmoid(x . shared_output_gate)"""

    @output_gate.setter
    def output_gate(self, arg: bool, /) -> None: ...

    def __eq__(self, other: object, /) -> bool: ...

    def __repr__(self) -> str: ...

class Problem:
    """
    The shape and arithmetic of one MoE layer.

    R ranks hold E experts in contiguous ranges whose sizes differ by at most one; H and I are multiples of 64. Checked by Layer and by the planner.
    """

    def __init__(self, *, num_ranks: int = 1, max_tokens: int, hidden: int, intermediate: int, num_experts: int, top_k: int, dtype: DType = DType.bf16, activation: Activation = ..., expert_bias: bool = False, shared: SharedExpert = ...) -> None: ...

    @property
    def num_ranks(self) -> int:
        """R"""

    @num_ranks.setter
    def num_ranks(self, arg: int, /) -> None: ...

    @property
    def max_tokens(self) -> int:
        """most tokens any rank brings to one pass"""

    @max_tokens.setter
    def max_tokens(self, arg: int, /) -> None: ...

    @property
    def hidden(self) -> int:
        """H, a multiple of 64"""

    @hidden.setter
    def hidden(self, arg: int, /) -> None: ...

    @property
    def intermediate(self) -> int:
        """I, a multiple of 64"""

    @intermediate.setter
    def intermediate(self, arg: int, /) -> None: ...

    @property
    def num_experts(self) -> int:
        """E over all ranks"""

    @num_experts.setter
    def num_experts(self, arg: int, /) -> None: ...

    @property
    def top_k(self) -> int:
        """K"""

    @top_k.setter
    def top_k(self, arg: int, /) -> None: ...

    @property
    def dtype(self) -> DType:
        """storage of x, weights and y: f32 or bf16"""

    @dtype.setter
    def dtype(self, arg: DType, /) -> None: ...

    @property
    def activation(self) -> Activation: ...

    @activation.setter
    def activation(self, arg: Activation, /) -> None: ...

    @property
    def expert_bias(self) -> bool:
        """biases on gate, up and down"""

    @expert_bias.setter
    def expert_bias(self, arg: bool, /) -> None: ...

    @property
    def shared(self) -> SharedExpert: ...

    @shared.setter
    def shared(self, arg: SharedExpert, /) -> None: ...

    def experts_of(self, rank: int) -> range:
        """The global experts that a rank holds."""

    def check(self) -> None:
        """Raises InvalidArgumentError for a shape that is not legal."""

    def __eq__(self, other: object, /) -> bool: ...

    def __repr__(self) -> str: ...

    def __str__(self) -> str: ...

class Preset:
    """A published layer shape."""

    @property
    def name(self) -> str: ...

    @property
    def hidden(self) -> int: ...

    @property
    def intermediate(self) -> int: ...

    @property
    def num_experts(self) -> int: ...

    @property
    def top_k(self) -> int: ...

    @property
    def shared(self) -> SharedExpert: ...

    @property
    def activation(self) -> Activation: ...

    @property
    def expert_bias(self) -> bool: ...

    @property
    def sigmoid_router(self) -> bool:
        """False: softmax"""

    @property
    def note(self) -> str: ...

    def problem(self, *, num_ranks: int, max_tokens: int, dtype: DType = DType.bf16) -> Problem:
        """The preset's layer on so many ranks."""

    def __repr__(self) -> str: ...

def presets() -> list[Preset]:
    """The published layer shapes."""

def find_preset(name: str) -> Preset:
    """
    The preset of that name. Raises InvalidArgumentError naming the closest one.
    """

class ExecMode(enum.Enum):
    """How a pass runs."""

    fused = 0
    """one persistent pass: every stage overlaps"""

    split = 1
    """the same bodies stage after stage"""

class TaskOrder(enum.Enum):
    """In which order tiles come."""

    slabs = 0
    """all FC1 tiles, then FC2 in column slabs"""

    lag = 1
    """FC2 of a band follows FC1 by lag_bands bands"""

class DispatchMode(enum.Enum):
    """Who moves rows to the experts."""

    pull = 0
    """the expert's rank reads rows from their home ranks"""

    push = 1
    """home ranks write rows into the expert's rank"""

class CombineMode(enum.Enum):
    """Who moves results home."""

    epilogue = 0
    """FC2 tiles write their row pieces home"""

    comm_workers = 1
    """communication workers carry them home"""

class SavePolicy(enum.Enum):
    """What forward keeps for backward."""

    none = 0
    """backward recomputes FC1 for every block"""

    z = 1
    """z = [gate, up] of the first saved_rows rows"""

    z_and_x = 2
    """x rows too: backward does not pull them again"""

class Plan:
    """
    Every tunable choice of a pass.

    A plan changes the time a pass takes and the memory it needs, never the bits. 0 in capacity_rows and the rings means all that can be needed; moxie.planner.choose_plan searches one for a machine.
    """

    def __init__(self, *, mode: ExecMode = ExecMode.fused, order: TaskOrder = TaskOrder.slabs, dispatch: DispatchMode = DispatchMode.pull, combine: CombineMode = CombineMode.epilogue, num_slabs: int = 4, band_blocks: int = 8, lag_bands: int = 2, minibatch_blocks: int = 1, capacity_rows: int = 0, x_ring_blocks: int = 0, hidden_ring_blocks: int = 0, chunk_blocks: int = 0, lag_chunks: int = 0, backward_ring_blocks: int = 0, save: SavePolicy = SavePolicy.z, saved_rows: int = -1, comm_workers: int = 0, compute_workers: int = 1) -> None: ...

    @property
    def mode(self) -> ExecMode: ...

    @mode.setter
    def mode(self, arg: ExecMode, /) -> None: ...

    @property
    def order(self) -> TaskOrder: ...

    @order.setter
    def order(self, arg: TaskOrder, /) -> None: ...

    @property
    def dispatch(self) -> DispatchMode: ...

    @dispatch.setter
    def dispatch(self, arg: DispatchMode, /) -> None: ...

    @property
    def combine(self) -> CombineMode: ...

    @combine.setter
    def combine(self, arg: CombineMode, /) -> None: ...

    @property
    def num_slabs(self) -> int:
        """FC2 column slabs"""

    @num_slabs.setter
    def num_slabs(self, arg: int, /) -> None: ...

    @property
    def band_blocks(self) -> int:
        """blocks that share a raster band"""

    @band_blocks.setter
    def band_blocks(self, arg: int, /) -> None: ...

    @property
    def lag_bands(self) -> int:
        """lag order: bands between FC1 and FC2"""

    @lag_bands.setter
    def lag_bands(self, arg: int, /) -> None: ...

    @property
    def minibatch_blocks(self) -> int:
        """blocks that share one readiness counter"""

    @minibatch_blocks.setter
    def minibatch_blocks(self, arg: int, /) -> None: ...

    @property
    def capacity_rows(self) -> int:
        """rows one rank can take, padded to blocks; 0: the worst case, proven"""

    @capacity_rows.setter
    def capacity_rows(self, arg: int, /) -> None: ...

    @property
    def x_ring_blocks(self) -> int:
        """slots for pulled rows; 0: all"""

    @x_ring_blocks.setter
    def x_ring_blocks(self, arg: int, /) -> None: ...

    @property
    def hidden_ring_blocks(self) -> int:
        """slots for hidden rows; 0: all"""

    @hidden_ring_blocks.setter
    def hidden_ring_blocks(self, arg: int, /) -> None: ...

    @property
    def chunk_blocks(self) -> int:
        """backward: blocks handed to wgrad at a time"""

    @chunk_blocks.setter
    def chunk_blocks(self, arg: int, /) -> None: ...

    @property
    def lag_chunks(self) -> int:
        """backward: chunks dgrad runs ahead of dX and wgrad; 0: enough"""

    @lag_chunks.setter
    def lag_chunks(self, arg: int, /) -> None: ...

    @property
    def backward_ring_blocks(self) -> int:
        """backward slots; 0: most of the expected rows"""

    @backward_ring_blocks.setter
    def backward_ring_blocks(self, arg: int, /) -> None: ...

    @property
    def save(self) -> SavePolicy: ...

    @save.setter
    def save(self, arg: SavePolicy, /) -> None: ...

    @property
    def saved_rows(self) -> int:
        """whole blocks are saved; -1: somewhat more than expected, z_and_x: all"""

    @saved_rows.setter
    def saved_rows(self, arg: int, /) -> None: ...

    @property
    def comm_workers(self) -> int:
        """
        per rank. CPU: threads, 0 means one. CUDA: CTAs, 0: the spare warps of all
        """

    @comm_workers.setter
    def comm_workers(self, arg: int, /) -> None: ...

    @property
    def compute_workers(self) -> int:
        """per rank, >= 1 (CPU)"""

    @compute_workers.setter
    def compute_workers(self, arg: int, /) -> None: ...

    def resolve(self, problem: Problem) -> Plan:
        """
        The plan with every 0 replaced by its number. Raises InvalidPlanError if it could deadlock or does not fit.
        """

    def __eq__(self, other: object, /) -> bool: ...

    def __repr__(self) -> str: ...

    def __str__(self) -> str: ...

def default_plan(problem: Problem) -> Plan:
    """The plan of a Layer made without one."""

class TraceEvent:
    """What one worker did, in nanoseconds since the pass began."""

    @property
    def rank(self) -> int: ...

    @property
    def role(self) -> Role: ...

    @property
    def worker(self) -> int:
        """index within (rank, role)"""

    @property
    def kind(self) -> str: ...

    @property
    def waits_for(self) -> str | None:
        """of a wait: which signal"""

    @property
    def block(self) -> int:
        """block, token unit or chunk; -1: none"""

    @property
    def tile(self) -> int:
        """column tile or slab; -1: none"""

    @property
    def shared(self) -> bool:
        """a task of the shared expert"""

    @property
    def begin_ns(self) -> int: ...

    @property
    def end_ns(self) -> int: ...

    def __repr__(self) -> str: ...

class Trace:
    """
    The timeline of one pass. Give an empty one to forward, infer or backward.
    """

    def __init__(self) -> None: ...

    @property
    def title(self) -> str: ...

    @title.setter
    def title(self, arg: str, /) -> None: ...

    @property
    def num_ranks(self) -> int: ...

    @property
    def comm_workers(self) -> int:
        """per rank"""

    @property
    def compute_workers(self) -> int:
        """per rank"""

    @property
    def events(self) -> list[TraceEvent]:
        """a copy, ordered by worker"""

    @property
    def span_ns(self) -> int:
        """time of the slowest worker"""

    def time_by_kind_ns(self) -> dict[str, int]:
        """Time of all workers by kind, each moment counted once."""

    def __repr__(self) -> str: ...

def trace_json(passes: Sequence[Trace]) -> str:
    """JSON for ui.perfetto.dev, one pass behind the other."""

def trace_svg(passes: Sequence[Trace], *, title: str, subtitle: str = '', width_px: float = 1200.0) -> str:
    """A picture, one pass below the other."""

class HostGemm(enum.Enum):
    """Which GEMM the CPU twin's tiles call."""

    automatic = 0
    """oneDNN where it passes its self-check"""

    onednn = 1

    plain = 2
    """plain loops"""

class FaultInjection:
    """Faults that a test injects. The defaults inject nothing."""

    def __init__(self, *, shuffle_seed: int = 0, max_delay_us: int = 20, poison_workspace: bool = False, late_rank: int = -1, late_ms: int = 0, kill_rank: int = -1, kill_after_steps: int = 0) -> None: ...

    @property
    def shuffle_seed(self) -> int:
        """not 0: random delays before every protocol step"""

    @shuffle_seed.setter
    def shuffle_seed(self, arg: int, /) -> None: ...

    @property
    def max_delay_us(self) -> int: ...

    @max_delay_us.setter
    def max_delay_us(self, arg: int, /) -> None: ...

    @property
    def poison_workspace(self) -> bool:
        """fill every buffer with 0xFF before each pass"""

    @poison_workspace.setter
    def poison_workspace(self, arg: bool, /) -> None: ...

    @property
    def late_rank(self) -> int: ...

    @late_rank.setter
    def late_rank(self, arg: int, /) -> None: ...

    @property
    def late_ms(self) -> int: ...

    @late_ms.setter
    def late_ms(self, arg: int, /) -> None: ...

    @property
    def kill_rank(self) -> int:
        """a worker of this rank ends silently ..."""

    @kill_rank.setter
    def kill_rank(self, arg: int, /) -> None: ...

    @property
    def kill_after_steps(self) -> int:
        """... after so many protocol steps"""

    @kill_after_steps.setter
    def kill_after_steps(self, arg: int, /) -> None: ...

    def __repr__(self) -> str: ...

def nccl_unique_id(*, library: str = '') -> bytes:
    """
    128 bytes by which the ranks of one World.nccl find each other.

    Called on one rank, which brings them to all others. Needs NCCL, but no GPU; the process must live until the World is made. Raises UnavailableError.
    """

class World:
    """
    The ranks that see each other's memory. One pass at a time.

    Made by one of its static methods. A context manager; layers keep it alive until close().
    """

    @staticmethod
    def cpu(*, num_ranks: int = 1, timeout_s: float = 300.0, validate_finite: bool = False, gemm: HostGemm = HostGemm.automatic, faults: FaultInjection = ...) -> World:
        """
        Ranks as groups of threads of this process.

        timeout_s bounds every wait (0: unbounded). validate_finite looks for NaN and infinity in inputs before each pass. Raises InvalidArgumentError.
        """

    @staticmethod
    def cpu_process(*, rank: int, num_ranks: int, name: str, timeout_s: float = 300.0, validate_finite: bool = False, gemm: HostGemm = HostGemm.automatic, faults: FaultInjection = ...) -> World:
        """
        One process per rank, on this machine, over shared memory.

        Every process calls it with its rank and the same name. It, Layer() and reset() wait until all ranks have called them; the lists of a pass have one entry, this rank's. Raises WaitTimeoutError when a rank does not come within timeout_s, InvalidArgumentError when ranks disagree, on every rank.
        """

    @staticmethod
    def cuda(*, num_ranks: int = 1, timeout_s: float = 300.0, validate_finite: bool = False, devices: Sequence[int] = [], reserve_sms: int = 0, cluster_size: int = 0) -> World:
        """
        Ranks on the GPUs of this process; passes are enqueued and return at once.

        devices: one per rank, a device named twice holds virtual ranks; empty: rank r on device r mod count. Raises UnavailableError in a build without CUDA (`has_cuda`).
        """

    @staticmethod
    def nccl(*, rank: int, num_ranks: int, unique_id: bytes | None = None, comm: int = 0, device: int = -1, timeout_s: float = 300.0, reserve_sms: int = 32, cluster_size: int = 0, faults: FaultInjection = ..., library: str = '') -> World:
        """
        One GPU and one process (or thread) per rank, over NCCL.

        unique_id: bytes of nccl_unique_id() of one rank, brought to all, for one World; or comm: an ncclComm_t, as an integer, of exactly these ranks. device: -1 is the current GPU. reserve_sms: SMs left to kernels of other libraries that wait for their peers; 0 where none run beside a pass. library: NCCL's file; empty: MOXIE_NCCL_LIBRARY, else the one that is loaded, else that of the package nvidia.nccl, else libnccl.so.2.

        It, Layer() and reset() wait until all ranks have called them; the lists of a pass have one entry, this rank's. Raises WaitTimeoutError when a rank does not come within timeout_s, InvalidArgumentError when ranks disagree, UnavailableError without CUDA, GPU or NCCL 2.28, or when the ranks do not share one NVLink domain.
        """

    @property
    def num_ranks(self) -> int: ...

    @property
    def local_ranks(self) -> range:
        """the ranks whose arrays a pass of this process takes"""

    @property
    def backend(self) -> str:
        """'cpu' or 'cuda'"""

    @property
    def closed(self) -> bool: ...

    @property
    def stopped(self) -> bool:
        """a pass timed out; further passes raise WorldStoppedError"""

    def reset(self) -> None:
        """Clears signals and counters; legal whenever no pass runs."""

    def set_timeout(self, seconds: float) -> None: ...

    def set_faults(self, faults: FaultInjection) -> None: ...

    def set_stream(self, stream: int) -> None:
        """
        CUDA: the cudaStream_t, as an integer, of rank 0's GPU that passes are ordered on. CPU: no effect.
        """

    def synchronize(self) -> None:
        """Waits for the passes enqueued and raises the error of the last one."""

    def describe_gemm(self) -> str: ...

    def close(self) -> None:
        """
        Frees the memory of the world, its layers and contexts. Closing twice is legal; every later use raises ClosedError.
        """

    def __enter__(self) -> object: ...

    def __exit__(self, type: object | None, value: object | None, traceback: object | None) -> None: ...

    def __repr__(self) -> str: ...

class Context:
    """
    What backward needs of one forward pass. Keeps its Layer alive; several may be alive at a time.
    """

    @property
    def num_bytes(self) -> int:
        """over all ranks"""

    @property
    def layer(self) -> Layer: ...

class Layer:
    """
    One MoE layer over the ranks of a World: plan proven, memory allocated.

    Without a plan: the one that `moxie tune` stored for this problem and machine, else the planner's where it is sure, else default_plan's. Keeps its World alive. Raises InvalidArgumentError or InvalidPlanError.
    """

    def __init__(self, world: World, problem: Problem, plan: Plan | None = None) -> None: ...

    @property
    def world(self) -> World: ...

    @property
    def problem(self) -> Problem: ...

    @property
    def plan(self) -> Plan:
        """resolved: no zeros left but that of comm_workers"""

    @property
    def plan_source(self) -> str:
        """
        where the plan is from, and why not from a better place: one line for people
        """

    @property
    def closed(self) -> bool: ...

    def forward(self, *, x: Sequence[Any], expert_ids: Sequence[Any], route_weights: Sequence[Any], weights: Sequence[moxie._weights.Weights], out: Sequence[Any] | None = None, context: Context | None = None, trace: Trace | None = None) -> tuple[list[Any], Context]:
        """
        Runs the layer over all ranks and keeps what backward needs.

        One entry per rank in each list; T is that rank's number of tokens, 0 to max_tokens.
          x              [T, H] problem.dtype
          expert_ids     [T, K] int32 or int64; global expert, -1 is no route
          route_weights  [T, K] float32; not read where the id is -1
          weights        moxie.Weights of the rank's experts
          out            [T, H] problem.dtype to write y into; allocated when None
          context        one that forward returned before, to be filled anew; made when None
          trace          moxie.trace.Trace that receives the timeline of this pass
        Returns the list of y, [T, H] each, and the context. Raises InvalidArgumentError or ArgumentTypeError for arrays that break a rule, InvalidRouteError, CapacityExceededError, NonFiniteError (validation), WaitTimeoutError, WorldStoppedError, ClosedError.
        """

    def infer(self, *, x: Sequence[Any], expert_ids: Sequence[Any], route_weights: Sequence[Any], weights: Sequence[moxie._weights.Weights], out: Sequence[Any] | None = None, trace: Trace | None = None) -> list[Any]:
        """As forward, but keeps nothing for backward. Returns the list of y."""

    def backward(self, context: Context, *, x: Sequence[Any], dy: Sequence[Any], weights: Sequence[moxie._weights.Weights], out: Sequence[moxie._weights.Gradients] | None = None, accumulate: bool = False, grads_dtype: DType | None = None, trace: Trace | None = None) -> list[moxie._weights.Gradients]:
        """
        Gradients of a forward pass, of which `context` came. May be called as often as you like.

          x, weights   the same values as in forward
          dy           [T, H] problem.dtype
          out          moxie.Gradients per rank whose arrays are written; those that are None are allocated
          accumulate   add weight gradients (float32) to what out holds; else they are overwritten, zeros for idle experts
          grads_dtype  of allocated matrices: f32 (when None) or problem.dtype; vectors are float32
        Returns moxie.Gradients per rank. Raises as forward does.
        """

    def make_context(self) -> Context:
        """
        A context for forward to fill, its memory allocated; so that no pass has to.
        """

    def input_buffer(self, rank: int) -> Any:
        """
        [max_tokens, H] of the rank's heap, where a pass puts x for its peers to read.

        A pass whose x of that rank is its first T rows copies nothing. float32, or BF16 bits as uint16, on the CPU; an array with DLPack on CUDA. Overwritten by passes with another x. While it is alive, no layer that would move the heap can be made.
        """

    def memory(self) -> dict[str, int]:
        """
        Bytes of one rank by buffer, and their total: forward and backward share addresses.
        """

    def close(self) -> None:
        """
        Frees the layer's memory and that of its contexts. Closing twice is legal.
        """

    def __enter__(self) -> object: ...

    def __exit__(self, type: object | None, value: object | None, traceback: object | None) -> None: ...

    def __repr__(self) -> str: ...

class Load(enum.Enum):
    """Which clock a GPU runs at."""

    burst = 0
    """a cool one, in its first milliseconds"""

    sustained = 1
    """thermally settled"""

class DeviceRecord:
    """What one GPU and its fabric can do, with sources."""

    @property
    def name(self) -> str: ...

    @property
    def title(self) -> str: ...

    @property
    def constants(self) -> dict[str, dict[str, Any]]:
        """value (None: not known), unit and source by name"""

    def machine(self, *, load: Load = Load.burst) -> Machine:
        """The record with its gaps filled."""

    def __repr__(self) -> str: ...

class Machine:
    """A device record with its gaps filled by stated rules."""

    @property
    def device(self) -> str: ...

    @property
    def clock_mhz(self) -> float: ...

    @property
    def assumed(self) -> list[str]:
        """one sentence for each number that is not known"""

    @property
    def values(self) -> dict[str, float]: ...

    def __repr__(self) -> str: ...

def device_names() -> list[str]:
    """Names of the device records that ship with Moxie."""

def find_device(name: str) -> DeviceRecord:
    """
    A shipped record by name, or the record in a file when `name` has a '/' or ends in .json. Raises InvalidArgumentError naming the field and the nearest legal value.
    """

def parse_device(json: str) -> DeviceRecord:
    """A record from its JSON text (docs/planner.md)."""

class Direction(enum.Enum):
    """Which pass."""

    forward = 0

    backward = 1

class Workers(enum.Enum):
    """Who does the work of a rank."""

    gpu = 0
    """the SMs of the device"""

    as_plan = 1
    """the plan's workers, as the threads of the CPU twin"""

class Skew(enum.Enum):
    """How unevenly tokens go to experts."""

    even = 0
    """every expert the same number of rows, as far as they divide"""

    uniform = 1
    """K different experts per token, equal chances"""

    zipf = 2
    """chances (1 + place)^-exponent"""

    hot = 3
    """one expert takes slot 0 of every token"""

class RoutingSpec:
    """Where tokens go, as a rule."""

    def __init__(self, *, skew: Skew = Skew.uniform, exponent: float = 1.0, expert: int = 0, seed: int = 1) -> None: ...

    @property
    def skew(self) -> Skew: ...

    @skew.setter
    def skew(self, arg: Skew, /) -> None: ...

    @property
    def exponent(self) -> float:
        """zipf"""

    @exponent.setter
    def exponent(self, arg: float, /) -> None: ...

    @property
    def expert(self) -> int:
        """hot"""

    @expert.setter
    def expert(self, arg: int, /) -> None: ...

    @property
    def seed(self) -> int: ...

    @seed.setter
    def seed(self, arg: int, /) -> None: ...

    def __repr__(self) -> str: ...

class Mechanisms:
    """What the pipeline has no plan option for."""

    def __init__(self, *, dedupe: bool | None = None, fused_activation: bool = True, mxfp8: bool = False, wave_barrier: bool = False) -> None: ...

    @property
    def dedupe(self) -> bool | None:
        """
        dispatch moves a token once per (token, rank); None: as the kernels do, over links, where the plan has a slot for every row
        """

    @dedupe.setter
    def dedupe(self, arg: bool | None, /) -> None: ...

    @property
    def fused_activation(self) -> bool: ...

    @fused_activation.setter
    def fused_activation(self, arg: bool, /) -> None: ...

    @property
    def mxfp8(self) -> bool: ...

    @mxfp8.setter
    def mxfp8(self, arg: bool, /) -> None: ...

    @property
    def wave_barrier(self) -> bool: ...

    @wave_barrier.setter
    def wave_barrier(self, arg: bool, /) -> None: ...

    def __repr__(self) -> str: ...

class LinkUse:
    """Share of a port's capacity in use over the pass."""

    @property
    def out(self) -> float:
        """mean over ranks"""

    @property
    def into(self) -> float:
        """mean over ranks"""

    @property
    def max_out(self) -> float: ...

    @property
    def max_into(self) -> float: ...

    @property
    def sent_bytes(self) -> float:
        """on the wire, all ranks, one direction"""

class SimResult:
    """One simulated pass."""

    @property
    def ms(self) -> float:
        """of the slowest rank"""

    @property
    def rank_ms(self) -> list[float]: ...

    @property
    def cta_seconds(self) -> dict[str, float]:
        """where the time of all CTAs goes"""

    @property
    def spare_warp_seconds(self) -> dict[str, float]: ...

    @property
    def link(self) -> LinkUse: ...

    @property
    def network(self) -> LinkUse: ...

    @property
    def gemm_stretch(self) -> float:
        """1.02: power stretches products by 2 %"""

    @property
    def num_tasks(self) -> int:
        """tiles of products"""

    @property
    def num_units(self) -> int:
        """of rows and tokens: dispatch, combine, merge"""

    @property
    def num_events(self) -> int: ...

    @property
    def routed_rows(self) -> int: ...

    @property
    def trace(self) -> Trace:
        """empty unless asked for"""

    def __repr__(self) -> str: ...

def simulate(*, problem: Problem, machine: Machine, plan: Plan | None = None, tokens: Sequence[int] = [], routing: RoutingSpec = ..., direction: Direction = Direction.forward, workers: Workers = Workers.gpu, reserve_sms: int = 0, one_rank: bool = False, trace: bool = False, mechanisms: Mechanisms = ...) -> SimResult:
    """
    One pass on a virtual clock; the same arguments give the same answer everywhere.

    plan: default_plan's when None. tokens: one number per rank, max_tokens when empty. one_rank: simulate rank 0 of equal ranks only. Raises InvalidArgumentError, InvalidPlanError.
    """

class Passes(enum.Enum):
    """Which passes a plan is to be good at."""

    forward = 0

    backward = 1

    both = 2

class Bounds:
    """Lower bounds of a pass: what no plan can beat."""

    @property
    def gemm_ms(self) -> float:
        """real FLOPs of the busiest rank at full rate"""

    @property
    def memory_ms(self) -> float:
        """weights and rows once through memory"""

    @property
    def link_ms(self) -> float:
        """bytes of the busiest port"""

    @property
    def network_ms(self) -> float:
        """the same between domains"""

    @property
    def lower_ms(self) -> float:
        """the largest of them"""

    def __repr__(self) -> str: ...

class RatedPlan:
    """A plan, its simulated times and its memory."""

    @property
    def plan(self) -> Plan:
        """resolved, legal"""

    @property
    def forward_ms(self) -> float:
        """0: not asked for, or it does not fit"""

    @property
    def backward_ms(self) -> float: ...

    @property
    def total_ms(self) -> float: ...

    @property
    def memory_gb(self) -> float:
        """of one rank"""

    @property
    def what(self) -> str:
        """of an alternative: what differs from the chosen plan"""

    def __repr__(self) -> str: ...

class PlanChoice:
    """The planner's answer."""

    @property
    def chosen(self) -> RatedPlan: ...

    @property
    def default_plan(self) -> RatedPlan: ...

    @property
    def alternatives(self) -> list[RatedPlan]:
        """the nearest in time, best first"""

    @property
    def forward_bounds(self) -> Bounds: ...

    @property
    def backward_bounds(self) -> Bounds: ...

    @property
    def forward(self) -> SimResult:
        """the chosen plan, simulated"""

    @property
    def backward(self) -> SimResult: ...

    @property
    def why(self) -> str:
        """one paragraph"""

    @property
    def notes(self) -> list[str]:
        """what a user must know: capacity, domains"""

    @property
    def assumed(self) -> list[str]:
        """what the device record does not say"""

    @property
    def num_estimated(self) -> int: ...

    @property
    def num_simulated(self) -> int: ...

    def __repr__(self) -> str: ...

def choose_plan(*, problem: Problem, machine: Machine, passes: Passes = Passes.both, routing: RoutingSpec = ..., reserve_sms: int = 0, all_ranks: bool = True, memory_gb: float = 0.0) -> PlanChoice:
    """
    Which plan for this layer on this machine, and why.

    max_tokens of the problem counts as the tokens of every rank. memory_gb: of one rank for heap, workspace and saved rows; 0: a quarter of the device's. all_ranks: simulate the chosen plan on all ranks. Raises InvalidArgumentError, InvalidPlanError when no plan fits.
    """

def bounds(*, problem: Problem, machine: Machine, plan: Plan | None = None, routing: RoutingSpec = ..., direction: Direction = Direction.forward) -> Bounds:
    """Lower bounds in closed form."""

def explain(choice: PlanChoice) -> str:
    """
    The reasons for a choice, what to know about it, and what it assumed, as text.
    """

has_cuda: bool

__version__: str
