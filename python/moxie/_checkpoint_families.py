"""How four families of Hugging Face checkpoints name and store an MoE layer, and the way to Moxie's arrays and back.

Moxie keeps gate, up [L, I, H] and down [L, H, I] of a rank's L experts. Most families have one matrix per expert and
projection in that orientation. GPT-OSS has them fused over experts, transposed, and gate and up interleaved:
gate_up_proj [E, H, 2 I] with gate in even and up in odd columns, down_proj [E, I, H].
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from moxie._errors import InvalidArgumentError
from moxie._safetensors import Tensors
from moxie._weights import Weights


@dataclass(frozen=True, kw_only=True)
class Family:
    """Names after `prefix`; {e} is the expert."""

    name: str
    prefix: str  # {layer}
    router: str
    router_bias: str | None = None
    correction_bias: str | None = None  # added to scores for choosing only
    experts: Mapping[str, str] | None = None  # gate, up, down; None: fused as in GPT-OSS
    shared: Mapping[str, str] | None = None  # shared_gate, shared_up, shared_down

    def full(self, layer: int, name: str, **more: int) -> str:
        return (self.prefix + name).format(layer=layer, **more)


PROJECTIONS = {part: "experts.{e}." + part + "_proj.weight" for part in ("gate", "up", "down")}
SHARED = {f"shared_{part}": f"shared_experts.{part}_proj.weight" for part in ("gate", "up", "down")}
FAMILIES = {
    f.name: f
    for f in (
        Family(
            name="mixtral",
            prefix="model.layers.{layer}.block_sparse_moe.",
            router="gate.weight",
            experts={"gate": "experts.{e}.w1.weight", "up": "experts.{e}.w3.weight", "down": "experts.{e}.w2.weight"},
        ),
        Family(name="qwen3_moe", prefix="model.layers.{layer}.mlp.", router="gate.weight", experts=PROJECTIONS),
        Family(
            name="deepseek_v3",
            prefix="model.layers.{layer}.mlp.",
            router="gate.weight",
            correction_bias="gate.e_score_correction_bias",
            experts=PROJECTIONS,
            shared=SHARED,
        ),
        Family(name="gpt_oss", prefix="model.layers.{layer}.mlp.", router="router.weight", router_bias="router.bias"),
    )
}


def find_family(tensors: Tensors, layer: int) -> Family:
    """By the names that the layer has."""
    has = {
        "mixtral": ["block_sparse_moe.gate.weight", "block_sparse_moe.experts.0.w1.weight"],
        "gpt_oss": ["mlp.experts.gate_up_proj", "mlp.experts.gate_up_proj_blocks"],
        "deepseek_v3": ["mlp.shared_experts.gate_proj.weight", "mlp.gate.e_score_correction_bias"],
        "qwen3_moe": ["mlp.gate.weight", "mlp.experts.0.gate_proj.weight"],
    }
    for name, marks in has.items():
        if any(f"model.layers.{layer}.{mark}" in tensors for mark in marks):
            return FAMILIES[name]
    raise InvalidArgumentError(
        f"layer {layer} of {tensors.path} has no MoE block of a known family ({', '.join(FAMILIES)}); its first "
        f"tensors are {sorted(n for n in tensors.files if f'.{layer}.' in n)[:3]}"
    )


def read_weights(tensors: Tensors, family: Family, layer: int, experts: range, sizes: tuple[int, int, int]) -> Weights:
    """Weights of some experts. sizes = E, H, I."""
    _, hidden, width = sizes
    weights = Weights()
    if family.experts is None:
        return _read_fused(tensors, family, layer, experts, sizes)
    for part, pattern in family.experts.items():
        shape = (hidden, width) if part == "down" else (width, hidden)
        array = None
        for i, e in enumerate(experts):
            name = family.full(layer, pattern, e=e)
            matrix = tensors.read(name, shape=shape)
            if array is None:
                array = np.empty((len(experts), *shape), matrix.dtype)
            if matrix.dtype != array.dtype:
                raise InvalidArgumentError(
                    f"tensor {name} of {tensors.files[name]} is {matrix.dtype}, must be {array.dtype}"
                )
            array[i] = matrix
        setattr(weights, part, array if array is not None else _none_of(tensors, family, layer, shape))
    shared = {part: family.full(layer, name) for part, name in (family.shared or {}).items()}
    if any(name in tensors for name in shared.values()):  # one without the others is an error, not a layer without
        for part, name in shared.items():
            setattr(weights, part, tensors.read(name))
    return weights


def _none_of(tensors: Tensors, family: Family, layer: int, shape: tuple[int, int]) -> Any:
    """A rank without experts (E < R) still needs the right dtype."""
    assert family.experts is not None
    like = tensors.read(family.full(layer, family.experts["gate"], e=0))
    return np.empty((0, *shape), like.dtype)


def _read_fused(tensors: Tensors, family: Family, layer: int, experts: range, sizes: tuple[int, int, int]) -> Weights:
    num_experts, hidden, width = sizes

    def read(name: str, *shape: int) -> Any:
        return tensors.read(family.full(layer, f"experts.{name}"), shape=(num_experts, *shape), rows=experts)

    gate_up, down = read("gate_up_proj", hidden, 2 * width), read("down_proj", width, hidden)
    biases = read("gate_up_proj_bias", 2 * width)
    return Weights(
        gate=np.ascontiguousarray(gate_up[:, :, 0::2].swapaxes(1, 2)),
        up=np.ascontiguousarray(gate_up[:, :, 1::2].swapaxes(1, 2)),
        down=np.ascontiguousarray(down.swapaxes(1, 2)),
        gate_bias=np.ascontiguousarray(biases[:, 0::2]),
        up_bias=np.ascontiguousarray(biases[:, 1::2]),
        down_bias=np.ascontiguousarray(read("down_proj_bias", hidden)),
    )


def write_weights(family: Family, layer: int, ranks: Sequence[Weights]) -> dict[str, Any]:
    """The reverse of read_weights, of all ranks in order."""

    def whole(part: str) -> Any:
        return np.concatenate([getattr(w, part) for w in ranks])

    if family.experts is None:
        gate_up, bias = (
            np.stack([whole("gate" + kind), whole("up" + kind)], axis=2) for kind in ("", "_bias")
        )  # [E, I, 2, H], [E, I, 2]
        num_experts, width, _, hidden = gate_up.shape
        fused = {
            "gate_up_proj": gate_up.reshape(num_experts, 2 * width, hidden).swapaxes(1, 2),
            "gate_up_proj_bias": bias.reshape(num_experts, 2 * width),
            "down_proj": whole("down").swapaxes(1, 2),
            "down_proj_bias": whole("down_bias"),
        }
        return {family.full(layer, f"experts.{name}"): np.ascontiguousarray(a) for name, a in fused.items()}
    out = {}
    for part, pattern in family.experts.items():
        for e, matrix in enumerate(whole(part)):
            out[family.full(layer, pattern, e=e)] = np.ascontiguousarray(matrix)
    for part, name in (family.shared or {}).items():
        if getattr(ranks[0], part) is not None:
            out[family.full(layer, name)] = np.ascontiguousarray(getattr(ranks[0], part))
    return out
