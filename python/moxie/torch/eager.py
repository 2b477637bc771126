"""Passes of plain tensors that nothing else wants to see: straight from Python into the layer, past torch's dispatcher.

The ops of moxie.torch.ops cost tens of microseconds per pass in the dispatcher alone. They remain what torch.compile,
fake tensors, dispatch modes (counters, selective checkpoints), functorch and traces see, and what a gradient of a
gradient goes through; the checks, and what runs, are the same.
"""

from typing import Any

import torch

from moxie.torch.layers import SharedLayer
from moxie.torch.ops import check_backward, check_forward

_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))


def _cannot_tell() -> bool:
    """In the place of a question that this torch does not answer: somebody may be looking, so the ops it is."""
    return True


# Private to torch. In one that has them no more every pass goes through the ops: slower, and right.
_dispatch_modes = getattr(torch._C, "_len_torch_dispatch_stack", _cannot_tell)
_functorch_transforms = getattr(torch._C, "_are_functorch_transforms_active", _cannot_tell)


def is_plain(*tensors: Any) -> bool:
    """Whether a pass of these may go this way."""
    return not (
        torch.compiler.is_compiling()
        or _dispatch_modes()
        or _functorch_transforms()
        or torch.jit.is_tracing()
        or not _PLAIN.issuperset(map(type, tensors))
    )


def infer(layer: SharedLayer, x: Any, expert_ids: Any, route_weights: Any, flat: Any, layout: int) -> torch.Tensor:
    """y, and nothing is kept."""
    check_forward(layer, x, expert_ids, route_weights, flat, layout)
    return layer.run_forward(x, expert_ids, route_weights, flat, layout, keep=False)[0]


class MoEPass(torch.autograd.Function):
    """forward: y. backward: gradients of x, route_weights and weights."""

    @staticmethod
    def forward(
        ctx: Any, x: Any, expert_ids: Any, route_weights: Any, layer: SharedLayer, layout: int, *flat: Any
    ) -> torch.Tensor:
        check_forward(layer, x, expert_ids, route_weights, flat, layout)
        y, token = layer.run_forward(x, expert_ids, route_weights, flat, layout, keep=True)
        ctx.layer, ctx.layout = layer, layout
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, token, *flat)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Any) -> Any:
        x, token, *flat = ctx.saved_tensors
        layer, layout = ctx.layer, ctx.layout
        if dy is None:
            return (None,) * (5 + len(flat))
        dy = dy.contiguous()
        if torch.is_grad_enabled() or not is_plain(dy):  # create_graph: the op knows what to say about that
            dx, d_route_weights, *grads = torch.ops.moxie.backward(dy, x, token, flat, layer.handle, layout)
        else:
            check_backward(dy, x)
            dx, d_route_weights, grads = layer.run_backward(dy, x, token, flat, layout)
        of_weights = layer.storage(layout).as_stored(grads) if grads else [None] * len(flat)
        return dx, None, d_route_weights, None, None, *of_weights


# Function.apply without its look for functorch, which is_plain has had: some 5 us. Private, too.
apply = getattr(super(torch.autograd.Function, MoEPass), "apply", MoEPass.apply)
