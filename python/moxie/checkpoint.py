"""One MoE layer of a Hugging Face checkpoint as Moxie's per-rank weights, and back. NumPy only.

    loaded = moxie.checkpoint.load_layer("path/to/model", layer=3, num_ranks=4)
    layer = moxie.Layer(world, loaded.problem(max_tokens=4096))
    y = layer.infer(x=..., expert_ids=..., route_weights=..., weights=loaded.weights)
    moxie.checkpoint.save("layer3.safetensors", moxie.checkpoint.export_layer(loaded))

Families: Mixtral, Qwen3-MoE, DeepSeek-V3, GPT-OSS in BF16 (docs/python.md lists their tensors). Weights are BF16 or F32
and are not converted. Needs the packages safetensors and ml_dtypes: pip install 'moxie-moe[checkpoint]'.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moxie import _checkpoint_families as families
from moxie._errors import InvalidArgumentError
from moxie._moxie import Activation, ActivationKind, DType, Problem, SharedExpert
from moxie._safetensors import Tensors, libraries, read_config
from moxie._weights import Weights

__all__ = ["LoadedLayer", "export_layer", "load_layer", "save"]


@dataclass(kw_only=True)
class LoadedLayer:
    """One MoE layer of a checkpoint, divided over ranks. The router is yours to run."""

    family: str  # mixtral, qwen3_moe, deepseek_v3 or gpt_oss
    layer: int
    num_ranks: int
    ranks: list[int]  # whose weights were loaded
    weights: list[Weights]  # one per entry of ranks
    num_experts: int
    hidden: int
    intermediate: int
    top_k: int | None  # from config.json, if there is one
    activation: Activation
    router: Any  # [E, H]
    router_bias: Any = None  # [E]; gpt_oss
    correction_bias: Any = None  # [E]; deepseek_v3: added to scores when experts are chosen

    def problem(self, *, max_tokens: int, top_k: int | None = None) -> Problem:
        """The layer's Problem. Raises InvalidArgumentError when neither config.json nor `top_k` says K."""
        top_k = self.top_k if top_k is None else top_k
        if top_k is None:
            raise InvalidArgumentError(
                "top_k is not known, must be given: the checkpoint has no config.json that says it"
            )
        w = self.weights[0]
        return Problem(
            num_ranks=self.num_ranks,
            max_tokens=max_tokens,
            hidden=self.hidden,
            intermediate=self.intermediate,
            num_experts=self.num_experts,
            top_k=top_k,
            dtype=DType.f32 if w.gate.dtype == "float32" else DType.bf16,
            activation=self.activation,
            expert_bias=w.gate_bias is not None,
            shared=SharedExpert(intermediate=0 if w.shared_gate is None else len(w.shared_gate)),
        )


def load_layer(
    path: str | os.PathLike[str],
    *,
    layer: int,
    num_ranks: int = 1,
    ranks: Sequence[int] | None = None,
    family: str | None = None,
) -> LoadedLayer:
    """Reads one MoE layer.

    path: a .safetensors file, or a folder with one, several, or model.safetensors.index.json. ranks: whose experts to
    read, all when None; of the others nothing is read. family: found by the tensors' names when None.
    Raises InvalidArgumentError naming tensor and file when something is missing, of another shape, or neither BF16 nor
    F32 (FP8 and MXFP4 checkpoints must be dequantised first); UnavailableError without safetensors and ml_dtypes.
    """
    wanted = list(range(num_ranks)) if ranks is None else list(ranks)
    for rank in wanted:
        if not 0 <= rank < num_ranks:
            raise InvalidArgumentError(f"rank {rank} of load_layer must be between 0 and {num_ranks - 1}")
    if not wanted:
        raise InvalidArgumentError("ranks of load_layer is empty, must name at least one rank; nearest legal value [0]")
    if family is not None and family not in families.FAMILIES:
        raise InvalidArgumentError(f"family is '{family}', must be one of {', '.join(families.FAMILIES)}")
    tensors, config = Tensors(path), read_config(path)
    f = families.FAMILIES[family] if family is not None else families.find_family(tensors, layer)
    router = tensors.read(f.full(layer, f.router))
    num_experts, hidden = router.shape
    if f.experts is not None:
        width = tensors.shape(f.full(layer, f.experts["gate"], e=0))[0]
    else:
        fused = f.full(layer, "experts.gate_up_proj")
        if fused + "_blocks" in tensors:
            raise InvalidArgumentError(
                f"tensor {fused}_blocks of {tensors.files[fused + '_blocks']} is MXFP4, must be {fused} in BF16; "
                "save the model in BF16 first"
            )
        width = tensors.shape(fused)[-1] // 2
    sizes = (num_experts, hidden, width)
    shape = Problem(
        num_ranks=num_ranks, max_tokens=1, hidden=hidden, intermediate=width, num_experts=num_experts, top_k=1
    )
    shape.check()  # sizes that no layer can have: before gigabytes are read

    def optional(name: str | None) -> Any:
        full = None if name is None else f.full(layer, name)
        return tensors.read(full, shape=(num_experts,)) if full is not None and full in tensors else None

    return LoadedLayer(
        family=f.name,
        layer=layer,
        num_ranks=num_ranks,
        ranks=wanted,
        weights=[families.read_weights(tensors, f, layer, shape.experts_of(r), sizes) for r in wanted],
        num_experts=num_experts,
        hidden=hidden,
        intermediate=width,
        top_k=config.get("num_experts_per_tok"),
        activation=_activation(f.name, config),
        router=router,
        router_bias=optional(f.router_bias),
        correction_bias=optional(f.correction_bias),
    )


def _activation(family: str, config: Mapping[str, Any]) -> Activation:
    if family != "gpt_oss":
        return Activation()
    return Activation(kind=ActivationKind.gpt_oss, limit=float(config.get("swiglu_limit", 7.0)))


def export_layer(loaded: LoadedLayer) -> dict[str, Any]:
    """The tensors of the checkpoint again, bit for bit, from the weights of all ranks (in any state of training).

    Raises InvalidArgumentError when not all ranks are there, in order.
    """
    if loaded.ranks != list(range(loaded.num_ranks)):
        raise InvalidArgumentError(
            f"export_layer has the weights of ranks {loaded.ranks}, must have all {loaded.num_ranks} in order"
        )
    f = families.FAMILIES[loaded.family]
    out = families.write_weights(f, loaded.layer, loaded.weights)
    vectors = {f.router: loaded.router, f.router_bias: loaded.router_bias, f.correction_bias: loaded.correction_bias}
    out.update((f.full(loaded.layer, n), a) for n, a in vectors.items() if n is not None and a is not None)
    return out


def save(path: str | os.PathLike[str], tensors: Mapping[str, Any]) -> None:
    """Writes tensors to a .safetensors file, which appears whole or not at all. BF16 as ml_dtypes.bfloat16."""
    target = Path(path)
    staged = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        libraries().numpy.save_file(dict(tensors), str(staged), metadata={"format": "np"})
        staged.replace(target)
    finally:
        staged.unlink(missing_ok=True)
