"""The ops torch.ops.moxie.*: what the dispatcher, autograd, FakeTensor and torch.compile see of a pass.

Plain tensors in and out, plus two integers: `layer`, the handle of a SharedLayer, and `layout`, which says how the list
of weights is stored (moxie.torch.weights). forward also returns a token, a CPU int64 tensor that stands for what the
layer keeps for backward. Fake implementations check the same rules, so that a wrong shape is an error when tracing.
"""

from typing import Any

import torch

from moxie._errors import InvalidArgumentError
from moxie.torch import weights as parts
from moxie.torch.layers import SharedLayer, find_layer

INTEGERS = (torch.int32, torch.int64)

_library = torch.library.Library("moxie", "DEF")
_library.define(
    "infer(Tensor x, Tensor expert_ids, Tensor route_weights, Tensor[] weights, int layer, int layout) -> Tensor"
)
_library.define(
    "forward(Tensor x, Tensor expert_ids, Tensor route_weights, Tensor[] weights, int layer, int layout) "
    "-> (Tensor y, Tensor token)"
)
_library.define("backward(Tensor dy, Tensor x, Tensor token, Tensor[] weights, int layer, int layout) -> Tensor[]")


def check_forward(layer: SharedLayer, x: Any, expert_ids: Any, route_weights: Any, flat: Any, layout: int) -> None:
    """Shapes, dtypes, devices, contiguity; real and fake tensors. Raises InvalidArgumentError."""
    p, device, shape = layer.sizes, layer.device, x.shape
    if (
        len(shape) != 2
        or shape[1] != p.hidden
        or shape[0] > p.max_tokens
        or x.dtype is not p.dtype
        or x.device != device
        or not x.is_contiguous()
        or expert_ids.shape != (shape[0], p.top_k)
        or expert_ids.dtype not in INTEGERS
        or expert_ids.device != device
        or not expert_ids.is_contiguous()
        or route_weights.shape != (shape[0], p.top_k)
        or route_weights.dtype is not torch.float32
        or route_weights.device != device
        or not route_weights.is_contiguous()
    ):
        _refuse(layer, x, expert_ids, route_weights)
    layer.storage(layout).check(flat)


def _refuse(layer: SharedLayer, x: Any, expert_ids: Any, route_weights: Any) -> None:
    """Says what is wrong."""
    p, device = layer.sizes, layer.device
    if x.dim() != 2:
        raise InvalidArgumentError(f"x is {list(x.shape)}, must be [T, {p.hidden}]")
    tokens = x.shape[0]
    parts.require("x", x, (tokens, p.hidden), (p.dtype,), device, "the layer stores in it")
    if tokens > p.max_tokens:
        raise InvalidArgumentError(
            f"x has {tokens} tokens, must be between 0 and {p.max_tokens} (max_tokens {layer.problem.max_tokens} on "
            f"{p.num_ranks} ranks of this process); nearest legal value {p.max_tokens}"
        )
    parts.require("expert_ids", expert_ids, (tokens, p.top_k), INTEGERS, device, "they are indices")
    why = "weights of routes are float32 in every layer"
    parts.require("route_weights", route_weights, (tokens, p.top_k), (torch.float32,), device, why)


def _infer(x: Any, expert_ids: Any, route_weights: Any, weights: Any, layer: int, layout: int) -> Any:
    target = find_layer(layer)
    check_forward(target, x, expert_ids, route_weights, weights, layout)
    return target.run_forward(x, expert_ids, route_weights, weights, layout, keep=False)[0]


def _infer_fake(x: Any, expert_ids: Any, route_weights: Any, weights: Any, layer: int, layout: int) -> Any:
    check_forward(find_layer(layer), x, expert_ids, route_weights, weights, layout)
    return torch.empty_like(x)


def _forward(x: Any, expert_ids: Any, route_weights: Any, weights: Any, layer: int, layout: int) -> Any:
    target = find_layer(layer)
    check_forward(target, x, expert_ids, route_weights, weights, layout)
    return target.run_forward(x, expert_ids, route_weights, weights, layout, keep=True)


def _forward_fake(x: Any, expert_ids: Any, route_weights: Any, weights: Any, layer: int, layout: int) -> Any:
    check_forward(find_layer(layer), x, expert_ids, route_weights, weights, layout)
    return torch.empty_like(x), torch.empty(1, dtype=torch.int64, device="cpu")


def check_backward(dy: Any, x: Any) -> None:
    """dy against x. Raises InvalidArgumentError."""
    if dy.shape != x.shape or dy.dtype is not x.dtype or dy.device != x.device or not dy.is_contiguous():
        parts.require("dy", dy, tuple(x.shape), (x.dtype,), x.device, "it is the gradient of y")


def _backward(dy: Any, x: Any, token: Any, weights: Any, layer: int, layout: int) -> list[Any]:
    """[dx, d_route_weights, gradients of the stored parts, stacked]; the last are absent with main gradients."""
    target = find_layer(layer)
    check_backward(dy, x)
    dx, d_route_weights, grads = target.run_backward(dy, x, token, weights, layout)
    return [dx, d_route_weights, *grads]


def _backward_fake(dy: Any, x: Any, token: Any, weights: Any, layer: int, layout: int) -> list[Any]:
    target = find_layer(layer)
    out = [torch.empty_like(x), x.new_empty((x.shape[0], target.sizes.top_k), dtype=torch.float32)]
    if layout & parts.MAIN_GRAD:
        return out
    for part in target.storage(layout).parts:
        out.append(x.new_empty(part.shape, dtype=x.dtype if part.is_matrix else torch.float32))
    return out


def _setup_context(ctx: Any, inputs: Any, output: Any) -> None:
    x, _, _, weights, ctx.layer, ctx.layout = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, output[1], *weights)


def _autograd(ctx: Any, dy: Any, _: Any) -> Any:
    x, token, *weights = ctx.saved_tensors
    if dy is None:
        return None, None, None, [None] * len(weights), None, None
    dx, d_route_weights, *grads = torch.ops.moxie.backward(dy.contiguous(), x, token, weights, ctx.layer, ctx.layout)
    grads = find_layer(ctx.layer).storage(ctx.layout).as_stored(grads) if grads else [None] * len(weights)
    return dx, None, d_route_weights, grads, None, None


def _no_context(ctx: Any, inputs: Any, output: Any) -> None:
    """Nothing is kept of a backward pass."""


def _second_derivative(ctx: Any, *_: Any) -> Any:
    raise InvalidArgumentError(
        "the gradient of a gradient of an MoE layer was asked for, must be a first derivative; call backward or "
        "torch.autograd.grad without create_graph"
    )


for _name, _implementation, _fake in (
    ("infer", _infer, _infer_fake),
    ("forward", _forward, _forward_fake),
    ("backward", _backward, _backward_fake),
):
    for _key in ("CPU", "CUDA"):
        _library.impl(_name, _implementation, _key)
    torch.library.register_fake(f"moxie::{_name}", _fake, lib=_library)
torch.library.register_autograd("moxie::forward", _autograd, setup_context=_setup_context, lib=_library)
torch.library.register_autograd("moxie::backward", _second_derivative, setup_context=_no_context, lib=_library)
# With main gradients a backward pass is more than what it returns.
torch.fx.node.has_side_effect(torch.ops.moxie.backward.default)
