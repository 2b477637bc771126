"""Random layers for tests: problem, inputs of every rank, expected shapes."""

from dataclasses import dataclass

import numpy as np

import moxie

WEIGHT_NAMES = tuple(moxie.Weights.__slots__)


@dataclass
class Case:
    problem: moxie.Problem
    x: list
    expert_ids: list
    route_weights: list
    weights: list
    dy: list

    @property
    def inputs(self):
        return {
            "x": self.x,
            "expert_ids": self.expert_ids,
            "route_weights": self.route_weights,
            "weights": self.weights,
        }

    @property
    def backward_inputs(self):
        return {"x": self.x, "dy": self.dy, "weights": self.weights}


def make_problem(*, ranks=2, max_tokens=16, experts=6, top_k=2, dtype=moxie.DType.f32, **more):
    more = {"hidden": 64, "intermediate": 64, **more}
    return moxie.Problem(num_ranks=ranks, max_tokens=max_tokens, num_experts=experts, top_k=top_k, dtype=dtype, **more)


def store(values, dtype, grid=None):
    """In the problem's storage type. With `grid`, multiples of it: products with clamps are then exact in FP32, and
    whether one lies within the clamp is never a matter of rounding."""
    values = np.ascontiguousarray(values, dtype=np.float32)
    if grid:
        values = np.round(values / grid).astype(np.float32) * np.float32(grid)
    return values if dtype == moxie.DType.f32 else moxie.bf16.to_bits(values)


def is_clamped(problem):
    return problem.activation.kind != moxie.ActivationKind.swiglu


def make_weights(problem, rng, rank):
    h, i, n = problem.hidden, problem.intermediate, len(problem.experts_of(rank))
    s = problem.shared.intermediate
    grid = 1 / 64 if is_clamped(problem) else None

    def random(*shape, scale=None):
        values = np.clip(rng.standard_normal(shape), -4, 4) * (scale or shape[-1] ** -0.5)
        return store(values, problem.dtype, grid)

    w = moxie.Weights(gate=random(n, i, h), up=random(n, i, h), down=random(n, h, i))
    if problem.expert_bias:
        w.gate_bias, w.up_bias = random(n, i, scale=0.3), random(n, i, scale=0.3)
        w.down_bias = random(n, h, scale=0.3)
    if s:
        w.shared_gate, w.shared_up, w.shared_down = random(s, h), random(s, h), random(h, s)
    if problem.shared.output_gate:
        w.shared_output_gate = random(h)
    return w


def make_ids(problem, rng, tokens, kind):
    e, k = problem.num_experts, problem.top_k
    ids = np.array([rng.permutation(e)[:k] if e >= k else rng.integers(e, size=k) for _ in range(tokens)])
    ids = ids.reshape(tokens, k).astype(np.int64)
    if kind == "holes":  # some slots without a route, the first token without any
        ids[rng.random((tokens, k)) < 0.4] = -1
        ids[:1] = -1
    elif kind == "duplicates":
        ids[:] = ids[:, :1]
    elif kind == "one":  # all to one expert, all others idle
        ids[:] = e - 1
    return ids


def make_case(problem, rng, *, tokens, routing="random", ids_dtype=np.int32, signed=True):
    case = Case(problem, [], [], [], [], [])
    for rank, t in enumerate(tokens):
        ids = make_ids(problem, rng, t, routing)
        weights = rng.random((t, problem.top_k)).astype(np.float32) - (0.3 if signed else 0.0)
        weights = weights.astype(np.float32)
        weights[ids < 0] = np.nan  # never read
        x = np.clip(rng.standard_normal((t, problem.hidden)), -4, 4)
        case.x.append(store(x, problem.dtype, 1 / 8 if is_clamped(problem) else None))
        case.dy.append(store(rng.standard_normal((t, problem.hidden)), problem.dtype))
        case.expert_ids.append(ids.astype(ids_dtype))
        case.route_weights.append(weights)
        case.weights.append(make_weights(problem, rng, rank))
    return case


def same_bits(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def compare_weights(check, got, want):
    """check(name, array, array) for every part that either has."""
    for name in WEIGHT_NAMES:
        g, w = getattr(got, name), getattr(want, name)
        assert (g is None) == (w is None), f"{name}: {type(g)}, wanted {type(w)}"
        if w is not None:
            check(name, g, w)
