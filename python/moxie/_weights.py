"""The arrays of one rank: weights in, gradients out. Plain holders; the bindings read them field by field."""

from dataclasses import dataclass
from typing import Any


@dataclass(kw_only=True, slots=True, eq=False)
class Weights:
    """Weights of one rank, or their gradients. Arrays that the layer has no part for stay None.

    L is the number of the rank's experts, H hidden, I intermediate, S that of the shared expert. Weights have the
    problem's dtype. Gradients of matrices are float32 or that dtype, those of biases and the output gate float32.
    """

    gate: Any = None  # [L, I, H]
    up: Any = None  # [L, I, H]
    down: Any = None  # [L, H, I]
    gate_bias: Any = None  # [L, I]
    up_bias: Any = None  # [L, I]
    down_bias: Any = None  # [L, H]
    shared_gate: Any = None  # [S, H]
    shared_up: Any = None  # [S, H]
    shared_down: Any = None  # [H, S]
    shared_output_gate: Any = None  # [H]


@dataclass(kw_only=True, slots=True, eq=False)
class Gradients:
    """What backward computes for one rank."""

    dx: Any = None  # [T, H] problem.dtype
    d_route_weights: Any = None  # [T, K] float32; 0 where the id is -1
    weights: Weights | None = None
