"""The weights of a layer as torch tensors: which there are, their shapes, how they are stored, and how they travel.

The library wants gate, up [L, I, H] and down [L, H, I] per rank, contiguous. L counts the experts of all ranks of this
process: they are one contiguous range, so a rank's weights are a slice of dimension 0 and nothing is ever copied. Two
choices of storage, both without copies:
  gate_up  "separate": two tensors; "fused": one tensor [2, L, I, H], gate first
  experts  "stacked": one tensor over the experts; "list": one tensor per expert, consecutive views of one buffer
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from moxie._errors import InvalidArgumentError
from moxie._moxie import DType, Problem

DTYPES = {DType.f32: torch.float32, DType.bf16: torch.bfloat16}
FUSED, LIST, MAIN_GRAD = 1, 2, 4  # bits of a layout: how the op's list of weights is to be read


@dataclass(kw_only=True, slots=True, eq=False)
class ExpertWeights:
    """Weights of the experts of this process, all of the problem's dtype. Parts that the layer has not stay None.

    L experts, H hidden, I intermediate, S that of the shared expert. Either gate and up, or gate_up. Each expert part
    (the first seven) is one tensor, or a list of L tensors that are consecutive views of one buffer.
    """

    gate: Any = None  # [L, I, H]
    up: Any = None  # [L, I, H]
    gate_up: Any = None  # [2, L, I, H]; of a list: 2 L tensors [I, H], all gates first
    down: Any = None  # [L, H, I]
    gate_bias: Any = None  # [L, I]
    up_bias: Any = None  # [L, I]
    down_bias: Any = None  # [L, H]
    shared_gate: Any = None  # [S, H]
    shared_up: Any = None  # [S, H]
    shared_down: Any = None  # [H, S]
    shared_output_gate: Any = None  # [H]


class Sizes(NamedTuple):
    """What shapes depend on, in plain numbers: torch.compile looks at no objects of the bindings."""

    hidden: int
    intermediate: int
    num_experts: int  # L: of the ranks of this process
    top_k: int
    max_tokens: int  # of the ranks of this process together
    num_ranks: int  # of this process
    dtype: torch.dtype
    expert_bias: bool
    shared: int  # intermediate size of the shared expert; 0: none
    output_gate: bool


def sizes_of(problem: Problem, ranges: Sequence[range]) -> Sizes:
    """ranges: the experts of each rank of this process."""
    return Sizes(
        hidden=problem.hidden,
        intermediate=problem.intermediate,
        num_experts=sum(len(r) for r in ranges),
        top_k=problem.top_k,
        max_tokens=problem.max_tokens * len(ranges),
        num_ranks=len(ranges),
        dtype=DTYPES[problem.dtype],
        expert_bias=problem.expert_bias,
        shared=problem.shared.intermediate,
        output_gate=problem.shared.output_gate,
    )


class Part(NamedTuple):
    """One tensor of the storage."""

    name: str
    shape: tuple[int, ...]  # stacked
    num_list: int  # tensors that it is in a list: 0 for parts without an expert dimension
    is_matrix: bool  # gradients of vectors are float32
    fan_in: int

    @property
    def is_shared(self) -> bool:
        """Of the shared expert, which all ranks have, and not of routed ones."""
        return self.name.startswith("shared_")


def parts_of(sizes: Sizes, layout: int) -> list[Part]:
    """The parts that a layer has, in the order in which the ops take them."""
    h, i, s, n = sizes.hidden, sizes.intermediate, sizes.shared, sizes.num_experts
    if layout & FUSED:
        parts = [Part("gate_up", (2, n, i, h), 2 * n, True, h)]
    else:
        parts = [Part("gate", (n, i, h), n, True, h), Part("up", (n, i, h), n, True, h)]
    parts.append(Part("down", (n, h, i), n, True, i))
    if sizes.expert_bias:
        parts += [Part(name, (n, i), n, False, h) for name in ("gate_bias", "up_bias")]
        parts.append(Part("down_bias", (n, h), n, False, i))
    if s:
        parts += [Part(name, (s, h), 0, True, h) for name in ("shared_gate", "shared_up")]
        parts.append(Part("shared_down", (h, s), 0, True, s))
    if sizes.output_gate:
        parts.append(Part("shared_output_gate", (h,), 0, False, h))
    return parts


def count_of(part: Part, layout: int) -> int:
    """How many tensors of the op's list the part is."""
    return part.num_list if layout & LIST and part.num_list else 1


def item_shape(part: Part, layout: int) -> tuple[int, ...]:
    """Of each of them."""
    return part.shape[-1 - part.is_matrix :] if layout & LIST and part.num_list else part.shape


def flatten(weights: ExpertWeights, sizes: Sizes) -> tuple[list[torch.Tensor], int]:
    """The op's list of tensors, and its layout. Raises InvalidArgumentError naming a part that is missing or extra."""
    fused = weights.gate_up is not None
    is_list = isinstance(weights.down, (list, tuple, torch.nn.ParameterList)) and sizes.num_experts > 0
    layout = (FUSED if fused else 0) | (LIST if is_list else 0)
    parts = parts_of(sizes, layout)
    names = {p.name for p in parts}
    for name in ExpertWeights.__slots__:
        if getattr(weights, name) is not None and name not in names:
            raise InvalidArgumentError(f"weights.{name} was given, must be None: the layer has {', '.join(names)}")
    flat: list[torch.Tensor] = []
    for part in parts:
        value, want = getattr(weights, part.name), part.num_list
        if value is None:
            raise InvalidArgumentError(f"weights.{part.name} is None, must be a tensor {list(part.shape)}")
        in_list = is_list and want > 0
        if isinstance(value, torch.Tensor) == in_list or (in_list and len(value) != want):
            seen = "a tensor" if isinstance(value, torch.Tensor) else f"a list of {len(value)}"
            must = f"a list of {want} tensors, as weights.down is a list" if in_list else "a tensor"
            raise InvalidArgumentError(f"weights.{part.name} is {seen}, must be {must}")
        flat.extend(value if in_list else [value])
    return flat, layout


class Storage:
    """One layout of a layer's weights: what every pass asks about it, worked out once."""

    def __init__(self, sizes: Sizes, layout: int, device: torch.device) -> None:
        self.sizes, self.device = sizes, device
        self.parts = parts_of(sizes, layout)
        self.counts = [count_of(p, layout) for p in self.parts]  # tensors of each part
        self.in_list = [bool(layout & LIST and p.num_list) for p in self.parts]
        shapes = zip(self.parts, self.counts, strict=True)
        self.shapes = [torch.Size(item_shape(p, layout)) for p, count in shapes for _ in range(count)]
        self.is_fused, self.has_list = bool(layout & FUSED), any(self.in_list)

    def check(self, flat: Sequence[torch.Tensor]) -> None:
        """Shapes, dtype, device and contiguity of an op's list. Raises InvalidArgumentError. No look at values."""
        dtype, device = self.sizes.dtype, self.device
        for w, shape in zip(flat, self.shapes, strict=True):
            if w.dtype is not dtype or w.shape != shape or w.device != device or not w.is_contiguous():
                return self._refuse(flat)

    def _refuse(self, flat: Sequence[torch.Tensor]) -> None:
        names = [p.name for p, n in zip(self.parts, self.counts, strict=True) for _ in range(n)]
        for name, w, shape in zip(names, flat, self.shapes, strict=True):
            why = "a layer has one dtype and one device"
            require(f"weights.{name}", w, shape, (self.sizes.dtype,), self.device, why)

    def stacked_parts(self, flat: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The parts as they are stored, without copies. Raises InvalidArgumentError for a list that is apart."""
        if not self.has_list:
            return list(flat)
        out, at = [], 0
        for part, count, in_list in zip(self.parts, self.counts, self.in_list, strict=True):
            out.append(stack(flat[at : at + count], part.name).view(part.shape) if in_list else flat[at])
            at += count
        return out

    def addresses(self, parts: Sequence[torch.Tensor]) -> list[int]:
        """Of stacked parts, or of tensors like them: gate, up, down and the others that there are, for the bindings."""
        out = [t.data_ptr() for t in parts]
        if self.is_fused:
            out.insert(1, out[0] + parts[0].numel() // 2 * parts[0].element_size())
        return out

    def by_name(self, flat: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """stacked_parts by name, gate_up divided into gate and up."""
        out = {p.name: t for p, t in zip(self.parts, self.stacked_parts(flat), strict=True)}
        if self.is_fused:
            gate_up = out.pop("gate_up")
            out = {"gate": gate_up[0], "up": gate_up[1], **out}
        return out

    def as_stored(self, grads: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Stacked gradients one by one as the weights are stored, in their dtype."""
        out: list[torch.Tensor] = []
        for part, grad, in_list in zip(self.parts, grads, self.in_list, strict=True):
            grad = grad if part.is_matrix else grad.to(self.sizes.dtype)
            out.extend(grad.view(part.num_list, *part.shape[-1 - part.is_matrix :]).unbind(0) if in_list else [grad])
        return out


def require(
    name: str, t: torch.Tensor, shape: tuple[Any, ...], dtypes: tuple[torch.dtype, ...], device: torch.device, why: str
) -> None:
    """One tensor against what the layer needs. Raises InvalidArgumentError with one sentence."""
    if tuple(t.shape) != tuple(shape):
        raise InvalidArgumentError(f"{name} is {list(t.shape)}, must be {list(shape)}")
    if t.dtype not in dtypes:
        words = " or ".join(str(d) for d in dtypes)
        raise InvalidArgumentError(f"{name} is {t.dtype}, must be {words}: {why}; nearest legal value {dtypes[0]}")
    if t.device != device:
        raise InvalidArgumentError(
            f"{name} is on {t.device}, must be on {device}, where the layer's World is: {why}; .to('{device}') moves it"
        )
    if not t.is_contiguous():
        raise InvalidArgumentError(
            f"{name} has strides {list(t.stride())}, must be contiguous; .contiguous() copies it"
        )


def stack(tensors: Sequence[torch.Tensor], name: str) -> torch.Tensor:
    """One tensor over consecutive ones, [n, ...]: a view. Raises InvalidArgumentError where they are apart."""
    first = tensors[0]
    num_bytes, buffer = first.numel() * first.element_size(), first.untyped_storage().data_ptr()
    for i, t in enumerate(tensors):
        # Addresses alone do not tell: allocators put tensors of different storages behind each other, too.
        apart = t.data_ptr() != first.data_ptr() + i * num_bytes or t.untyped_storage().data_ptr() != buffer
        if apart or not t.is_contiguous():
            raise InvalidArgumentError(
                f"weights.{name}[{i}] does not follow weights.{name}[{i - 1}] in memory, must be consecutive views of "
                "one buffer; MoE.pack() makes them so"
            )
    return first.as_strided((len(tensors), *first.shape), (first.numel(), *first.stride()))


# ---- other people's layouts ----


def from_halves(gate_up: torch.Tensor) -> torch.Tensor:
    """[E, 2 I, H], gate rows first (transformers 5) -> [2, E, I, H], a view."""
    return gate_up.unflatten(1, (2, -1)).transpose(0, 1)


def to_halves(gate_up: torch.Tensor) -> torch.Tensor:
    """[2, E, I, H] -> [E, 2 I, H], gate rows first."""
    return gate_up.transpose(0, 1).flatten(1, 2)


def from_interleaved(gate_up: torch.Tensor) -> torch.Tensor:
    """[E, H, 2 I], gate in even and up in odd columns (GPT-OSS) -> [2, E, I, H], a view."""
    return gate_up.unflatten(2, (-1, 2)).permute(3, 0, 2, 1)


def to_interleaved(gate_up: torch.Tensor) -> torch.Tensor:
    """[2, E, I, H] -> [E, H, 2 I], gate in even and up in odd columns."""
    return gate_up.permute(1, 3, 2, 0).flatten(2, 3)
