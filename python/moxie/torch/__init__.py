"""Moxie for PyTorch: the layer as a module and as a function, with autograd, torch.compile and CUDA graphs.

    import moxie.torch

    problem = moxie.find_preset("qwen3-30b-a3b").problem(num_ranks=1, max_tokens=4096)
    router = moxie.torch.TopKRouter(problem.hidden, problem.num_experts, problem.top_k)
    layer = moxie.torch.MoE(problem, router=router)
    y = layer(x)

Imported on demand: `import moxie` never imports torch. docs/from-your-moe-layer.md leads there from other layers.
"""

from moxie._errors import UnavailableError

try:
    import torch as _torch
except ImportError as error:
    raise UnavailableError(
        "moxie.torch needs PyTorch 2.6 or newer, which is not installed: pip install torch"
    ) from error

if tuple(int(n) for n in _torch.__version__.split(".")[:2]) < (2, 6):
    raise UnavailableError(f"moxie.torch found PyTorch {_torch.__version__}, must be 2.6 or newer")

from moxie.torch.layers import SharedLayer, open_layer
from moxie.torch.module import MoE, moe
from moxie.torch.router import Routing, TopKRouter, load_balancing_loss
from moxie.torch.weights import (
    ExpertWeights,
    from_halves,
    from_interleaved,
    to_halves,
    to_interleaved,
)
from moxie.torch.world import (
    expert_parameters,
    ignore_experts_in_ddp,
    local_world,
    scale_expert_grads,
    world_from_group,
)

__all__ = [
    "ExpertWeights",
    "MoE",
    "Routing",
    "SharedLayer",
    "TopKRouter",
    "expert_parameters",
    "from_halves",
    "from_interleaved",
    "ignore_experts_in_ddp",
    "load_balancing_loss",
    "local_world",
    "moe",
    "open_layer",
    "scale_expert_grads",
    "to_halves",
    "to_interleaved",
    "world_from_group",
]
