"""Where backward writes the gradients of weights: tensors that autograd takes on to .grad, or FP32 main gradients.

A weight with an attribute `main_grad` (float32, same shape) has its gradient added there, by the pass itself, and its
.grad stays None. All weights of a layer have one or none has. Otherwise gradients are new tensors in the dtype of the
weight, rounded once from FP32 sums.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from moxie._errors import InvalidArgumentError
from moxie._weights import Weights
from moxie.torch import weights as parts


def main_grads_of(flat: Sequence[torch.Tensor]) -> bool:
    """Whether the weights have main gradients. Raises InvalidArgumentError for half of them, or wrong ones."""
    has = [hasattr(w, "main_grad") for w in flat]
    if not any(has):
        return False
    if not all(has):
        raise InvalidArgumentError(
            f"weight {has.index(False)} of {len(flat)} has no main_grad, must have one: others of the layer have it"
        )
    for i, w in enumerate(flat):
        g = w.main_grad
        if g.dtype != torch.float32 or g.shape != w.shape or g.device != w.device:
            raise InvalidArgumentError(
                f"main_grad of weight {i} is {list(g.shape)} {g.dtype} on {g.device}, must be {list(w.shape)} "
                f"torch.float32 on {w.device}"
            )
    return True


class GradBuffers:
    """The arrays of one backward pass. flat, layout: as in the ops."""

    def __init__(self, sizes: parts.Sizes, layout: int, flat: Sequence[torch.Tensor]) -> None:
        self.num_ranks, self.into_main = sizes.num_ranks, bool(layout & parts.MAIN_GRAD)
        self._buffers: dict[str, torch.Tensor] = {}  # by stored part; of a shared expert one per rank
        self._added: list[tuple[list[torch.Tensor], str]] = []  # main gradients that a buffer is added to at the end
        at, device = 0, flat[0].device
        for part in parts.parts_of(sizes, layout):
            count = parts.count_of(part, layout)
            weights, at = flat[at : at + count], at + count
            dtype = sizes.dtype if part.is_matrix and not self.into_main else torch.float32
            per_rank = self.num_ranks > 1 and part.name.startswith("shared_")
            shape = (self.num_ranks, *part.shape) if per_rank else part.shape
            if not self.into_main:
                self._buffers[part.name] = torch.empty(shape, dtype=dtype, device=device)
                continue
            targets = [w.main_grad for w in weights]
            buffer = None if per_rank else _in_place(targets, part.shape)
            if buffer is None:  # a list that is not one buffer, or a shared expert's, whose ranks add up
                buffer = torch.zeros(shape, dtype=dtype, device=device)
                self._added.append((targets, part.name))
            self._buffers[part.name] = buffer

    def per_rank(self, ranges: Sequence[range], wrap: Callable[[torch.Tensor], Any]) -> list[Weights]:
        """What each rank writes."""
        named = dict(self._buffers)
        if "gate_up" in named:
            gate_up = named.pop("gate_up")
            named["gate"], named["up"] = gate_up[0], gate_up[1]
        begin, out = ranges[0].start, []
        for i, r in enumerate(ranges):
            mine = {}
            for name, t in named.items():
                if self.num_ranks > 1:
                    t = t[i] if name.startswith("shared_") else t[r.start - begin : r.stop - begin]
                mine[name] = wrap(t)
            out.append(Weights(**mine))
        return out

    def finish(self) -> dict[str, torch.Tensor]:
        """Gradients by stored part, in their order; empty when they went into main gradients."""
        if self.num_ranks > 1:
            for name, t in self._buffers.items():
                if name.startswith("shared_"):
                    self._buffers[name] = t.sum(0, dtype=torch.float32).to(t.dtype)
        for targets, name in self._added:
            pieces = self._buffers[name].reshape(len(targets), *targets[0].shape)
            for target, piece in zip(targets, pieces, strict=True):
                target.add_(piece)
        return {} if self.into_main else self._buffers


def _in_place(targets: list[torch.Tensor], shape: tuple[int, ...]) -> torch.Tensor | None:
    """One contiguous tensor over the main gradients of a part, if that is what they are."""
    if not all(t.is_contiguous() for t in targets):
        return None
    if len(targets) == 1:
        return targets[0].view(shape)
    try:
        return parts.stack(targets, "main_grad").view(shape)
    except InvalidArgumentError:
        return None
