"""MoE: the layer as an nn.Module, and moe: the same as a function of tensors."""

from typing import Any

import torch
from torch import nn

from moxie._errors import InvalidArgumentError
from moxie._moxie import Plan, Problem, World
from moxie.torch import eager
from moxie.torch import weights as parts
from moxie.torch.grads import main_grads_of
from moxie.torch.layers import SharedLayer, open_layer
from moxie.torch.weights import ExpertWeights
from moxie.torch.world import local_world


def moe(
    x: torch.Tensor,
    expert_ids: torch.Tensor,
    route_weights: torch.Tensor,
    weights: ExpertWeights,
    *,
    layer: SharedLayer,
) -> torch.Tensor:
    """One pass of the layer, differentiable by x, route_weights and weights.

      x              [T, H] problem.dtype, contiguous; T tokens of this process, 0 to layer.max_tokens, divided evenly
                     over its ranks when it has several
      expert_ids     [T, K] int32 or int64; global expert, -1 is no route
      route_weights  [T, K] float32; not read, and its gradient 0, where the id is -1
      weights        ExpertWeights of this process's experts
      layer          of open_layer
    Returns y [T, H]. Collective: every rank of the World runs the same passes in the same order, also with T = 0.
    Gradients of weights with a `main_grad` (float32) are added there, .grad stays None. With gradients switched off
    nothing is kept. Raises InvalidArgumentError for tensors that break a rule, ClosedError, and on the CPU what
    moxie.Layer.forward raises; on CUDA errors of a pass come from World.synchronize() or the next pass.
    """
    flat, layout = parts.flatten(weights, layer.sizes)
    return _run(x, expert_ids, route_weights, flat, layout, layer)


def _run(x: Any, expert_ids: Any, route_weights: Any, flat: list[Any], layout: int, layer: SharedLayer) -> Any:
    learns = torch.is_grad_enabled() and (
        x.requires_grad or route_weights.requires_grad or any([w.requires_grad for w in flat])
    )
    plain = eager.is_plain(x, expert_ids, route_weights, *flat)
    if not learns:
        if plain:
            return eager.infer(layer, x, expert_ids, route_weights, flat, layout)
        return torch.ops.moxie.infer(x, expert_ids, route_weights, flat, layer.handle, layout)
    if not torch.compiler.is_compiling():
        layer.refuse_input_buffer(x)
    if main_grads_of(flat):
        layout |= parts.MAIN_GRAD
    if plain:
        return eager.apply(x, expert_ids, route_weights, layer, layout, *flat)
    return torch.ops.moxie.forward(x, expert_ids, route_weights, flat, layer.handle, layout)[0]


class MoE(nn.Module):
    """A Mixture-of-Experts layer whose experts are divided over the ranks of a World.

      world    local_world() when None. All modules of equal problem and plan share its layer, and so their workspace
      problem  moxie.Problem: sizes, dtype (bf16; f32 on the CPU only), activation, biases, shared expert
      router   a module that maps x [T, H] to (expert_ids, route_weights, ...), as TopKRouter; None: given to forward
      gate_up  "separate": parameters gate and up [L, I, H]; "fused": one parameter gate_up [2, L, I, H]
      experts  "stacked": one parameter over the L experts of this process; "list": a ParameterList of one per expert
               (views of one buffer), e.g. for optimizers that treat matrices one by one
      plan     moxie.Plan; None: as moxie.Layer chooses
      device   for a CUDA World: where tensors are, the current GPU when None
      initialize  False leaves the weights uninitialised, for those that are loaded next
    state_dicts of all four storages load into each other. Parameters are initialised per global expert from torch's
    generator, so that a seed means the same experts for any number of ranks. Collective, as moxie.Layer is.
    Raises InvalidArgumentError; in a CUDA graph capture, too.
    """

    def __init__(
        self,
        problem: Problem,
        world: World | None = None,
        *,
        router: nn.Module | None = None,
        gate_up: str = "separate",
        experts: str = "stacked",
        plan: Plan | None = None,
        device: torch.device | str | None = None,
        initialize: bool = True,
    ) -> None:
        super().__init__()
        for name, value, legal in (
            ("gate_up", gate_up, ("separate", "fused")),
            ("experts", experts, ("stacked", "list")),
        ):
            if value not in legal:
                raise InvalidArgumentError(f"{name} is '{value}', must be '{legal[0]}' or '{legal[1]}'")
        world = local_world(device) if world is None else world
        self.layer = open_layer(world, problem, plan, device=device)
        self.router = router
        layer = self.layer
        in_list = experts == "list" and layer.sizes.num_experts > 0
        self._layout = (parts.FUSED if gate_up == "fused" else 0) | (parts.LIST if in_list else 0)
        self._storage = layer.storage(self._layout)
        self._parts = self._storage.parts
        self._names = [p.name for p in self._parts]
        for part in self._parts:
            whole = torch.empty(part.shape, dtype=layer.sizes.dtype, device=layer.device)
            if in_list and part.num_list:
                items = whole.view(part.num_list, *parts.item_shape(part, self._layout))
                self.register_module(part.name, nn.ParameterList([nn.Parameter(t) for t in items]))
            else:
                self.register_parameter(part.name, nn.Parameter(whole))
            for p in self._tensors_of(part):
                p.moxie_expert = not part.name.startswith("shared_")
        self._register_load_state_dict_pre_hook(self._convert_state)
        if initialize:
            self.reset_parameters()

    # ---- weights ----

    def _tensors_of(self, part: parts.Part) -> list[Any]:
        value = getattr(self, part.name)
        return [value] if isinstance(value, torch.Tensor) else list(value)

    def flat_weights(self) -> list[Any]:
        """All parameters of the experts and the shared expert, in the order of the ops."""
        own = self._parameters  # what is not there is in a list, or kept elsewhere by what wraps the module
        if torch.compiler.is_compiling() or not all(map(own.__contains__, self._names)):
            return [t for part in self._parts for t in self._tensors_of(part)]
        return [own[name] for name in self._names]

    @torch.no_grad()
    def stacked_weights(self) -> dict[str, torch.Tensor]:
        """Views of the parameters as gate, up [L, I, H], down [L, H, I] and so on, whatever the storage."""
        self.pack()
        return self._storage.by_name([t.detach() for t in self.flat_weights()])

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Uniform in +-1/sqrt(fan in) per expert, as nn.Linear has; biases 0."""
        seed = int(torch.randint(2**62, (1,), device="cpu"))
        begin, layer = self.layer.ranges[0].start, self.layer
        for number, (name, whole) in enumerate(self.stacked_weights().items()):
            if name.endswith("_bias"):
                whole.zero_()
                continue
            shared = name.startswith("shared_")
            for e, item in enumerate([whole] if shared else whole):
                generator = torch.Generator().manual_seed(seed + 16 * (0 if shared else begin + e) + number)
                limit = item.shape[-1] ** -0.5
                values = torch.empty(item.shape, device="cpu").uniform_(-limit, limit, generator=generator)
                item.copy_(values.to(layer.device, layer.sizes.dtype))

    @torch.no_grad()
    def pack(self) -> None:
        """Makes listed experts views of one buffer again, where something has replaced them. No-op otherwise."""
        if not self._layout & parts.LIST:
            return
        for part in self._parts:
            tensors = self._tensors_of(part)
            if not part.num_list:
                continue
            try:
                parts.stack(tensors, part.name)
            except InvalidArgumentError:
                whole = torch.stack([t.detach() for t in tensors])
                for tensor, view in zip(tensors, whole, strict=True):
                    tensor.data = view

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        super()._apply(fn, recurse)
        self.pack()
        return self

    def make_main_grads(self) -> None:
        """Gives every weight a main_grad: float32 zeros, one buffer per part. Backward then adds there."""
        for part in self._parts:
            whole = torch.zeros(part.shape, dtype=torch.float32, device=self.layer.device)
            tensors = self._tensors_of(part)
            for tensor, view in zip(tensors, whole.view(len(tensors), *tensors[0].shape), strict=True):
                tensor.main_grad = view

    def zero_main_grads(self) -> None:
        """Sets every main_grad to zero."""
        for tensor in self.flat_weights():
            tensor.main_grad.zero_()

    def _convert_state(self, state: dict[str, Any], prefix: str, *_: Any) -> None:
        """A state_dict of another storage becomes one of this storage."""
        names = [p.name for layout in (0, parts.FUSED) for p in parts.parts_of(self.layer.sizes, layout)]
        found: dict[str, Any] = {}
        for name in dict.fromkeys(names):
            whole = state.get(prefix + name)
            items = [k for k in state if k.startswith(f"{prefix}{name}.")]
            if whole is None and items:
                whole = torch.stack([state[f"{prefix}{name}.{i}"] for i in range(len(items))])
                for key in items:
                    del state[key]
            if whole is not None:
                found[name] = whole
                state.pop(prefix + name, None)
        if "gate_up" in found:
            both = found.pop("gate_up")
            both = both.reshape(2, -1, *both.shape[-2:])
            found["gate"], found["up"] = both[0], both[1]
        if self._layout & parts.FUSED and "gate" in found and "up" in found:
            found["gate_up"] = torch.stack([found.pop("gate"), found.pop("up")])
        in_list = {p.name: p for p in self._parts if self._layout & parts.LIST and p.num_list}
        for name, whole in found.items():
            if name not in in_list:
                state[prefix + name] = whole
                continue
            items = whole.reshape(-1, *parts.item_shape(in_list[name], self._layout))
            state.update({f"{prefix}{name}.{i}": item for i, item in enumerate(items)})

    # ---- passes ----

    def forward(
        self, x: torch.Tensor, expert_ids: torch.Tensor | None = None, route_weights: torch.Tensor | None = None
    ) -> torch.Tensor:
        """y of the shape of x, [..., H]; ids and weights [T, K] of the router when not given. As moe()."""
        layer, shape = self.layer, x.shape
        if shape[-1] != layer.sizes.hidden:
            raise InvalidArgumentError(f"x is {list(shape)}, must be [..., {layer.sizes.hidden}]")
        if not x.is_contiguous():
            raise InvalidArgumentError(f"x has strides {list(x.stride())}, must be contiguous; .contiguous() copies it")
        tokens = x if len(shape) == 2 else x.view(-1, shape[-1])
        if (expert_ids is None) != (route_weights is None):
            raise InvalidArgumentError("expert_ids and route_weights must be given together, or neither")
        if expert_ids is None:
            if self.router is None:
                raise InvalidArgumentError(
                    "expert_ids and route_weights were not given, must be: the module was made without a router"
                )
            expert_ids, route_weights = self.router(tokens)[:2]
        y = _run(tokens, expert_ids, route_weights, self.flat_weights(), self._layout, layer)
        return y if len(shape) == 2 else y.view(shape)

    def input_buffer(self, num_tokens: int) -> torch.Tensor:
        """[T, H] in the memory where a pass looks for x: write there and pass it as x, and nothing is copied.

        For inference: every other pass of the World overwrites it, so it cannot hold what backward needs again. While
        it is alive, no layer that needs a larger heap can be made in the World. Processes with one rank only.
        """
        return self.layer.input_buffer(num_tokens)

    def reserve_contexts(self, count: int) -> None:
        """Makes contexts until `count` are free, for as many forward passes in CUDA graph captures."""
        self.layer.reserve_contexts(count)

    def memory(self) -> dict[str, int]:
        """Bytes in this process by buffer: those of Layer.memory() for its ranks, `contexts` (all made so far; both are
        shared by all modules of the layer), `weights` of this module, and their `total`."""
        layer, ranks = self.layer, len(self.layer.ranges)
        out = {name: num_bytes * ranks for name, num_bytes in layer.layer.memory().items()}
        total = out.pop("total")  # less than the sum: forward and backward share addresses
        out["contexts"] = layer.context_bytes
        out["weights"] = sum(t.numel() * t.element_size() for t in self.flat_weights())
        return {**out, "total": total + out["contexts"] + out["weights"]}

    def extra_repr(self) -> str:
        return f"{self.layer.problem}, {self.layer.world.backend}"
