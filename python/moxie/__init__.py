"""Moxie: a whole Mixture-of-Experts layer in one pass, forward and backward, over all ranks at once.

    with moxie.World.cpu(num_ranks=2) as world:
        layer = moxie.Layer(world, moxie.Problem(num_ranks=2, max_tokens=64, hidden=128, ...))
        y, context = layer.forward(x=..., expert_ids=..., route_weights=..., weights=...)
        grads = layer.backward(context, x=..., dy=..., weights=...)

Lists have one entry per rank of this process. NumPy arrays on CPUs, arrays with DLPack on GPUs. Modules: moxie.planner
(plans, simulator, device records), moxie.trace (timelines), moxie.checkpoint (Hugging Face weights), moxie.bf16.
"""

from moxie import bf16, checkpoint, planner, trace
from moxie._errors import (
    ArgumentTypeError,
    CapacityExceededError,
    ClosedError,
    Error,
    InvalidArgumentError,
    InvalidPlanError,
    InvalidRouteError,
    NonFiniteError,
    UnavailableError,
    WaitTimeoutError,
    WorldStoppedError,
)
from moxie._moxie import (
    Activation,
    ActivationKind,
    CombineMode,
    Context,
    DispatchMode,
    DType,
    ErrorCode,
    ExecMode,
    FaultInjection,
    HostGemm,
    Layer,
    Plan,
    Preset,
    Problem,
    Role,
    SavePolicy,
    SharedExpert,
    TaskOrder,
    WaitRecord,
    World,
    __version__,
    default_plan,
    find_preset,
    has_cuda,
    nccl_unique_id,
    presets,
)
from moxie._weights import Gradients, Weights

__all__ = [
    "Activation",
    "ActivationKind",
    "ArgumentTypeError",
    "CapacityExceededError",
    "ClosedError",
    "CombineMode",
    "Context",
    "DType",
    "DispatchMode",
    "Error",
    "ErrorCode",
    "ExecMode",
    "FaultInjection",
    "Gradients",
    "HostGemm",
    "InvalidArgumentError",
    "InvalidPlanError",
    "InvalidRouteError",
    "Layer",
    "NonFiniteError",
    "Plan",
    "Preset",
    "Problem",
    "Role",
    "SavePolicy",
    "SharedExpert",
    "TaskOrder",
    "UnavailableError",
    "WaitRecord",
    "WaitTimeoutError",
    "Weights",
    "World",
    "WorldStoppedError",
    "__version__",
    "bf16",
    "checkpoint",
    "default_plan",
    "find_preset",
    "has_cuda",
    "nccl_unique_id",
    "planner",
    "presets",
    "trace",
]
