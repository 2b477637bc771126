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
    integers = (torch.int32, torch.int64)
    parts.require("expert_ids", expert_ids, (tokens, p.top_k), integers, device, "they are indices")
    why = "weights of routes are float32 in every layer"
    parts.require("route_weights", route_weights, (tokens, p.top_k), (torch.float32,), device, why)
    parts.check(flat, p, layout, device)


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


def _backward(dy: Any, x: Any, token: Any, weights: Any, layer: int, layout: int) -> list[Any]:
    """[dx, d_route_weights, gradients of the stored parts, stacked]; the last are absent with main gradients."""
    target = find_layer(layer)
    parts.require("dy", dy, tuple(x.shape), (x.dtype,), x.device, "it is the gradient of y")
    dx, d_route_weights, grads = target.run_backward(dy, x, token, weights, layout)
    return [dx, d_route_weights, *grads.values()]


def _backward_fake(dy: Any, x: Any, token: Any, weights: Any, layer: int, layout: int) -> list[Any]:
    p = find_layer(layer).sizes
    out = [torch.empty_like(x), x.new_empty((x.shape[0], p.top_k), dtype=torch.float32)]
    if layout & parts.MAIN_GRAD:
        return out
    for part in parts.parts_of(p, layout):
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
    return dx, None, d_route_weights, _as_stored(ctx, weights, grads), None, None


def _no_context(ctx: Any, inputs: Any, output: Any) -> None:
    """Nothing is kept of a backward pass."""


def _second_derivative(ctx: Any, *_: Any) -> Any:
    raise InvalidArgumentError(
        "the gradient of a gradient of an MoE layer was asked for, must be a first derivative; call backward or "
        "torch.autograd.grad without create_graph"
    )


def _as_stored(ctx: Any, weights: list[Any], grads: list[Any]) -> list[Any]:
    """Gradients one by one as the weights were given, in their dtype."""
    if not grads:
        return [None] * len(weights)
    sizes, out = find_layer(ctx.layer).sizes, []
    for part, grad in zip(parts.parts_of(sizes, ctx.layout), grads, strict=True):
        grad = grad.to(sizes.dtype)
        count = parts.count_of(part, ctx.layout)
        in_list = ctx.layout & parts.LIST and part.num_list
        out.extend(grad.reshape(count, *parts.item_shape(part, ctx.layout)).unbind(0) if in_list else [grad])
    return out


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
