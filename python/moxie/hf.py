"""Hugging Face models with Moxie's layers: one or all MoE layers of a checkpoint as modules, or the blocks of a
transformers model replaced in place. Needs PyTorch; transformers only for models, safetensors only for checkpoints.

    names = moxie.hf.swap_blocks(model, max_tokens=4096)          # Mixtral, Qwen3-MoE, DeepSeek-V3, GPT-OSS
    layer = moxie.hf.load_layer("path/to/model", layer=3, max_tokens=4096)

swap_blocks keeps each block's own router, so that the same experts are chosen; experts and the shared expert move into
a moxie.torch.MoE, of which a rank keeps its own experts only. Blocks are those of transformers 5.
"""

import os
import re
from typing import Any

import numpy as np
import torch
from torch import nn

import moxie.torch as mt
from moxie import checkpoint as checkpoints
from moxie._errors import InvalidArgumentError
from moxie._moxie import Activation, ActivationKind, DType, Plan, Problem, SharedExpert, World
from moxie._safetensors import Tensors, read_config
from moxie.torch.streams import state_of

__all__ = ["MoxieBlock", "load_layer", "load_layers", "original_state_dict", "swap_blocks"]

BLOCKS = {
    "MixtralSparseMoeBlock": "mixtral",
    "Qwen3MoeSparseMoeBlock": "qwen3_moe",
    "DeepseekV3MoE": "deepseek_v3",
    "GptOssMLP": "gpt_oss",
}
_ROUTER = re.compile(r"model\.layers\.(\d+)\.(?:block_sparse_moe\.gate|mlp\.gate|mlp\.router)\.weight")


class MoxieBlock(nn.Module):
    """Stands for an MoE block of transformers: the block's own router, and a moxie.torch.MoE for the rest.

    Takes [batch, sequence, H] and returns what the block returned: the same shape, for GPT-OSS also the weights of the
    routes. Raises what moxie.torch.moe raises.
    """

    def __init__(self, family: str, block: nn.Module, experts: mt.MoE) -> None:
        super().__init__()
        self.family = family
        self.router_name = "router" if family == "gpt_oss" else "gate"
        self.add_module(self.router_name, getattr(block, self.router_name))
        self.experts = experts
        self.jitter_noise = float(getattr(block, "jitter_noise", 0.0))
        self.train(block.training)

    def forward(self, hidden_states: torch.Tensor) -> Any:
        """hidden_states [batch, sequence, H]."""
        if self.training and self.jitter_noise > 0:
            low, high = 1.0 - self.jitter_noise, 1.0 + self.jitter_noise
            hidden_states = hidden_states * torch.empty_like(hidden_states).uniform_(low, high)
        tokens = hidden_states.reshape(-1, hidden_states.shape[-1]).contiguous()
        _, route_weights, expert_ids = getattr(self, self.router_name)(tokens)
        y = self.experts(tokens, expert_ids.contiguous(), route_weights.float().contiguous())
        y = y.view(hidden_states.shape)
        return (y, route_weights) if self.family == "gpt_oss" else y


def swap_blocks(
    model: nn.Module,
    *,
    max_tokens: int,
    world: World | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    plan: Plan | None = None,
    **storage: Any,
) -> list[str]:
    """Replaces every MoE block of a transformers model by a MoxieBlock, in place, one by one. Returns their names.

    max_tokens: most tokens (batch times sequence) of one pass in this process. world: moxie.torch.local_world() when
    None; all ranks of it swap together, and each keeps its experts. checkpoint: where to read experts from, only those
    of this rank; the blocks' own may be on the meta device then. storage: gate_up and experts, as MoE takes them.
    Raises InvalidArgumentError for a model without such blocks, another activation, or another dtype than BF16 or
    float32.
    """
    names = [name for name, m in model.named_modules() if type(m).__name__ in BLOCKS]
    if not names:
        raise InvalidArgumentError(
            f"{type(model).__name__} has no MoE block to swap, must have one of {', '.join(BLOCKS)}"
        )
    for name in names:
        block = model.get_submodule(name)  # not kept: each block's experts are freed when it is replaced
        family = BLOCKS[type(block).__name__]
        _check_block(name, family, block, getattr(model, "config", None))
        device = getattr(block, "router" if family == "gpt_oss" else "gate").weight.device
        device = None if device.type == "meta" else device
        where = mt.local_world(device) if world is None else world
        if checkpoint is None:
            weights = _weights_of(family, block)
        else:
            weights = _read(checkpoint, int(re.findall(r"\.(\d+)\.", f".{name}.")[-1]), where, family)[1]
        problem = _problem_of(family, block, weights, where, max_tokens)
        experts = mt.MoE(problem, where, plan=plan, device=device, initialize=False, **storage)
        _fill(experts, weights, whole=checkpoint is None)
        parent, _, own = name.rpartition(".")
        setattr(model.get_submodule(parent), own, MoxieBlock(family, block, experts))
        del weights, block
    return names


def load_layer(
    path: str | os.PathLike[str],
    *,
    layer: int,
    max_tokens: int,
    world: World | None = None,
    family: str | None = None,
    top_k: int | None = None,
    plan: Plan | None = None,
    device: torch.device | str | None = None,
    **storage: Any,
) -> mt.MoE:
    """One MoE layer of a checkpoint as a module with its router (moxie.torch.TopKRouter, set up by config.json).

    path, family, top_k: as moxie.checkpoint.load_layer takes them; only this rank's experts are read. device: of the
    world that is made when world is None. Raises what load_layer raises there.
    """
    world = mt.local_world(device) if world is None else world
    loaded, weights = _read(path, layer, world, family)
    problem = loaded.problem(max_tokens=max_tokens, top_k=top_k)
    where = state_of(world, None if device is None else torch.device(device)).device
    router = _router_of(loaded.family, read_config(path), problem, where)
    state = {"weight": loaded.router, "bias": loaded.router_bias, "e_score_correction_bias": loaded.correction_bias}
    router.load_state_dict({n: _tensor(a) for n, a in state.items() if a is not None})
    module = mt.MoE(problem, world, router=router, plan=plan, device=where, initialize=False, **storage)
    _fill(module, weights, whole=False)
    return module


def load_layers(path: str | os.PathLike[str], **options: Any) -> dict[int, mt.MoE]:
    """All MoE layers of a checkpoint by number; options as load_layer takes them. They share one workspace."""
    numbers = sorted({int(m[1]) for name in Tensors(path).files if (m := _ROUTER.fullmatch(name))})
    if not numbers:
        raise InvalidArgumentError(f"{path} has no MoE layer of a known family")
    return {number: load_layer(path, layer=number, **options) for number in numbers}


def original_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """The model's state_dict with names and layouts of transformers, e.g. for model.save_pretrained(state_dict=...).

    Raises InvalidArgumentError where the experts are divided over several processes.
    """
    state = model.state_dict()
    for name, block in model.named_modules():
        if not isinstance(block, MoxieBlock):
            continue
        layer = block.experts.layer
        if layer.sizes.num_experts != layer.problem.num_experts:
            raise InvalidArgumentError(
                f"{name} has {layer.sizes.num_experts} of {layer.problem.num_experts} experts in this process, must "
                "have all of them to be written as one state_dict"
            )
        prefix = f"{name}." if name else ""
        for key in [k for k in state if k.startswith(f"{prefix}experts.")]:
            del state[key]
        for key, tensor in _original(block.family, block.experts.stacked_weights()).items():
            state[prefix + key] = tensor
    return state


def _check_block(name: str, family: str, block: nn.Module, config: Any) -> None:
    if getattr(getattr(block, "experts", None), "gate_up_proj", None) is None:
        raise InvalidArgumentError(
            f"{name} ({type(block).__name__}) has no experts.gate_up_proj, must be a block of transformers 5 or newer"
        )
    act = getattr(config, "hidden_act", "silu")
    if family != "gpt_oss" and act not in ("silu", "swish"):
        raise InvalidArgumentError(f"hidden_act of {name} is {act}, must be silu; nearest legal value silu")


def _weights_of(family: str, block: Any) -> dict[str, torch.Tensor]:
    """All experts of a block of transformers, by Moxie's names."""
    experts = block.experts
    if family == "gpt_oss":
        gate, up = mt.from_interleaved(experts.gate_up_proj.detach())
        biases = experts.gate_up_proj_bias.detach()
        return {
            "gate": gate,
            "up": up,
            "down": experts.down_proj.detach().transpose(1, 2),
            "gate_bias": biases[:, 0::2],
            "up_bias": biases[:, 1::2],
            "down_bias": experts.down_proj_bias.detach(),
        }
    gate, up = mt.from_halves(experts.gate_up_proj.detach())
    weights = {"gate": gate, "up": up, "down": experts.down_proj.detach()}
    if family == "deepseek_v3":
        for part in ("gate", "up", "down"):
            weights[f"shared_{part}"] = getattr(block.shared_experts, f"{part}_proj").weight.detach()
    return weights


def _original(family: str, w: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The reverse of _weights_of."""
    gate_up = torch.stack([w["gate"], w["up"]])
    if family == "gpt_oss":
        return {
            "experts.gate_up_proj": mt.to_interleaved(gate_up),
            "experts.gate_up_proj_bias": torch.stack([w["gate_bias"], w["up_bias"]], dim=2).flatten(1),
            "experts.down_proj": w["down"].transpose(1, 2).contiguous(),
            "experts.down_proj_bias": w["down_bias"].clone(),
        }
    out = {"experts.gate_up_proj": mt.to_halves(gate_up), "experts.down_proj": w["down"].clone()}
    for part in ("gate", "up", "down"):
        if f"shared_{part}" in w:
            out[f"shared_experts.{part}_proj.weight"] = w[f"shared_{part}"].clone()
    return out


def _problem_of(family: str, block: Any, weights: dict[str, torch.Tensor], world: World, max_tokens: int) -> Problem:
    _, width, hidden = weights["gate"].shape
    dtypes = {torch.bfloat16: DType.bf16, torch.float32: DType.f32}
    if weights["gate"].dtype not in dtypes:
        raise InvalidArgumentError(
            f"experts are {weights['gate'].dtype}, must be torch.bfloat16 or torch.float32; convert the model first; "
            "nearest legal value torch.bfloat16"
        )
    ranks = len(world.local_ranks)
    activation = Activation()
    if family == "gpt_oss":
        e = block.experts
        activation = Activation(kind=ActivationKind.gpt_oss, limit=float(e.limit), alpha=float(e.alpha))
    router = getattr(block, "router" if family == "gpt_oss" else "gate")
    return Problem(
        num_ranks=world.num_ranks,
        max_tokens=-(-max_tokens // ranks),
        hidden=hidden,
        intermediate=width,
        num_experts=router.weight.shape[0],
        top_k=router.top_k,
        dtype=dtypes[weights["gate"].dtype],
        activation=activation,
        expert_bias="gate_bias" in weights,
        shared=SharedExpert(intermediate=len(weights["shared_gate"]) if "shared_gate" in weights else 0),
    )


def _router_of(family: str, config: dict[str, Any], problem: Problem, device: torch.device) -> mt.TopKRouter:
    options: dict[str, Any] = {"mixtral": {}, "gpt_oss": {"score": "softmax_of_chosen", "bias": True}}.get(family, {})
    if family == "qwen3_moe":
        options = {"normalize": bool(config.get("norm_topk_prob", False))}
    if family == "deepseek_v3":
        options = {
            "score": "sigmoid",
            "correction": True,
            "normalize": bool(config.get("norm_topk_prob", True)),
            "scale": float(config.get("routed_scaling_factor", 1.0)),
            "num_groups": int(config.get("n_group") or 1),
            "top_groups": int(config.get("topk_group") or 1),
        }
    dtype = {DType.bf16: torch.bfloat16, DType.f32: torch.float32}[problem.dtype]
    return mt.TopKRouter(problem.hidden, problem.num_experts, problem.top_k, dtype=dtype, device=device, **options)


def _read(path: Any, layer: int, world: World, family: str | None) -> tuple[Any, dict[str, torch.Tensor]]:
    """The experts of this process's ranks, by Moxie's names."""
    ranks = list(world.local_ranks)
    loaded = checkpoints.load_layer(path, layer=layer, num_ranks=world.num_ranks, ranks=ranks, family=family)
    weights = {}
    for name in type(loaded.weights[0]).__slots__:
        arrays = [getattr(w, name) for w in loaded.weights]
        if arrays[0] is not None:
            weights[name] = _tensor(arrays[0] if name.startswith("shared_") else np.concatenate(arrays))
    return loaded, weights


def _tensor(array: Any) -> torch.Tensor:
    """NumPy has no BF16: ml_dtypes' travels as its bits."""
    array = np.ascontiguousarray(array)
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)
    return torch.from_numpy(array)


@torch.no_grad()
def _fill(module: mt.MoE, weights: dict[str, torch.Tensor], *, whole: bool) -> None:
    """Copies weights into a module. whole: they are those of all ranks."""
    ranges = module.layer.ranges
    for name, target in module.stacked_weights().items():
        source = weights[name]
        if whole and not name.startswith("shared_"):
            source = source[ranges[0].start : ranges[-1].stop]
        target.copy_(source)
