"""Where backward writes the gradients of weights: tensors that autograd takes on to .grad, or FP32 main gradients.

A weight with an attribute `main_grad` (float32, same shape) has its gradient added there, by the pass itself, and its
.grad stays None. All weights of a layer have one or none has. Otherwise gradients are new tensors in the dtype of the
weight, rounded once from FP32 sums.
"""

from collections.abc import Sequence

import torch

from moxie._errors import InvalidArgumentError
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
        if g.dtype is not torch.float32 or g.shape != w.shape or g.device != w.device:
            raise InvalidArgumentError(
                f"main_grad of weight {i} is {list(g.shape)} {g.dtype} on {g.device}, must be {list(w.shape)} "
                f"torch.float32 on {w.device}"
            )
    return True


class GradBuffers:
    """The tensors that one backward pass writes. flat: the op's list of weights."""

    def __init__(self, storage: parts.Storage, flat: Sequence[torch.Tensor], into_main: bool) -> None:
        self.storage, self.into_main = storage, into_main
        self.tensors: list[torch.Tensor] = []  # by stored part; of a shared expert one per rank
        self._added: list[tuple[list[torch.Tensor], int]] = []  # main gradients that a tensor is added to at the end
        at = 0
        for i, (part, count) in enumerate(zip(storage.parts, storage.counts, strict=True)):
            weights, at = flat[at : at + count], at + count
            per_rank = storage.sizes.num_ranks > 1 and part.is_shared
            if not (into_main or per_rank or storage.in_list[i]) and part.is_matrix:
                self.tensors.append(torch.empty_like(weights[0]))
                continue
            shape = (storage.sizes.num_ranks, *part.shape) if per_rank else part.shape
            if not into_main:
                dtype = storage.sizes.dtype if part.is_matrix else torch.float32
                self.tensors.append(weights[0].new_empty(shape, dtype=dtype))
                continue
            targets = [w.main_grad for w in weights]
            buffer = None if per_rank else _in_place(targets, part.shape)
            if buffer is None:  # a list that is not one buffer, or a shared expert's, whose ranks add up
                buffer = weights[0].new_zeros(shape, dtype=torch.float32)
                self._added.append((targets, i))
            self.tensors.append(buffer)

    def finish(self) -> list[torch.Tensor]:
        """Gradients by stored part, in their order; empty when they went into main gradients."""
        if self.storage.sizes.num_ranks > 1:
            for i, part in enumerate(self.storage.parts):
                if part.is_shared:
                    t = self.tensors[i]
                    self.tensors[i] = t.sum(0, dtype=torch.float32).to(t.dtype)
        for targets, i in self._added:
            pieces = self.tensors[i].reshape(len(targets), *targets[0].shape)
            for target, piece in zip(targets, pieces, strict=True):
                target.add_(piece)
        return [] if self.into_main else self.tensors


def _in_place(targets: list[torch.Tensor], shape: tuple[int, ...]) -> torch.Tensor | None:
    """One contiguous tensor over the main gradients of a part, if that is what they are."""
    if not all(t.is_contiguous() for t in targets):
        return None
    if len(targets) == 1:
        return targets[0] if targets[0].shape == shape else targets[0].view(shape)
    try:
        return parts.stack(targets, "main_grad").view(shape)
    except InvalidArgumentError:
        return None
