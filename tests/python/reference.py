"""The layer in plain FP64 NumPy, written from its definition: no ranks, no blocks, one route after another.

Shares nothing with the library. Inputs are the per-rank arrays of a `Case`; results are per rank, too, so that a
test compares array by array.
"""

import numpy as np

import moxie


def widen(array):
    """float64 values of float32, BF16 bits or ml_dtypes.bfloat16."""
    if array.dtype == np.float32:
        return array.astype(np.float64)
    return moxie.bf16.from_bits(array).astype(np.float64)


def sigmoid(v):
    return np.exp(-np.logaddexp(0.0, -v))


def activate(g, u, activation):
    """The activation and its derivatives by g and u."""
    if activation.kind == moxie.ActivationKind.swiglu:
        s = sigmoid(g)
        return g * s * u, (s + g * s * (1 - s)) * u, g * s
    limit = float(np.float32(activation.limit))
    gc, uc = np.minimum(g, limit), np.clip(u, -limit, limit)
    g_free, u_free = (g <= limit).astype(float), (np.abs(u) <= limit).astype(float)
    alpha, shift = 1.0, 0.0
    if activation.kind == moxie.ActivationKind.gpt_oss:
        alpha, shift = float(np.float32(activation.alpha)), 1.0
    s = sigmoid(alpha * gc)
    dg = (s + alpha * gc * s * (1 - s)) * (uc + shift)
    return gc * s * (uc + shift), dg * g_free, gc * s * u_free


class Expert:
    """gate, up, down and biases of one expert; counts its own gradients."""

    def __init__(self, gate, up, down, biases=None):
        self.gate, self.up, self.down = widen(gate), widen(up), widen(down)
        zeros = np.zeros(len(self.gate)), np.zeros(len(self.gate)), np.zeros(len(self.down))
        self.biases = zeros if biases is None else tuple(widen(b) for b in biases)
        self.grads = [np.zeros_like(m) for m in (self.gate, self.up, self.down, *self.biases)]

    def forward(self, x, activation):
        g, u = self.gate @ x + self.biases[0], self.up @ x + self.biases[1]
        return self.down @ activate(g, u, activation)[0] + self.biases[2]

    def backward(self, x, d_out, activation):
        """d_out is the gradient of this expert's output; returns dx."""
        a, da_dg, da_du = activate(self.gate @ x + self.biases[0], self.up @ x + self.biases[1], activation)
        da = self.down.T @ d_out
        dg, du = da * da_dg, da * da_du
        for grad, term in zip(
            self.grads, (np.outer(dg, x), np.outer(du, x), np.outer(d_out, a), dg, du, d_out), strict=True
        ):
            grad += term
        return self.gate.T @ dg + self.up.T @ du


def run(problem, xs, ids, route_weights, weights, dys):
    """Returns (ys, Gradients per rank, bounds of |d_route_weights| per rank), all float64."""
    experts, scales = [], []
    for w in weights:
        for e in range(len(w.gate)):
            biases = (w.gate_bias[e], w.up_bias[e], w.down_bias[e]) if problem.expert_bias else None
            experts.append(Expert(w.gate[e], w.up[e], w.down[e], biases))
    ys, results = [], []
    for rank, w in enumerate(weights):
        x, dy = widen(xs[rank]), widen(dys[rank])
        y, dx = np.zeros_like(x), np.zeros_like(x)
        d_weights = np.zeros((len(x), problem.top_k))
        scale = np.zeros_like(d_weights)
        shared = Expert(w.shared_gate, w.shared_up, w.shared_down) if problem.shared.intermediate else None
        gate = widen(w.shared_output_gate) if problem.shared.output_gate else None
        d_gate = np.zeros(problem.hidden)
        for t in range(len(x)):
            for k in range(problem.top_k):
                e = int(ids[rank][t, k])
                if e < 0:
                    continue
                weight = float(route_weights[rank][t, k])
                out = experts[e].forward(x[t], problem.activation)
                y[t] += weight * out
                d_weights[t, k] = out @ dy[t]
                scale[t, k] = np.linalg.norm(out) * np.linalg.norm(dy[t])
                dx[t] += experts[e].backward(x[t], weight * dy[t], problem.activation)
            if shared is not None:
                out = shared.forward(x[t], problem.activation)
                s = sigmoid(x[t] @ gate) if gate is not None else 1.0
                y[t] += s * out
                dx[t] += shared.backward(x[t], s * dy[t], problem.activation)
                if gate is not None:
                    slope = s * (1 - s) * (out @ dy[t])
                    dx[t] += slope * gate
                    d_gate += slope * x[t]
        ys.append(y)
        scales.append(scale)
        results.append(moxie.Gradients(dx=dx, d_route_weights=d_weights, weights=shared_grads(problem, shared, d_gate)))
    at = 0
    for rank, result in enumerate(results):
        mine = experts[at : at + len(weights[rank].gate)]
        at += len(mine)
        names = ("gate", "up", "down") + (("gate_bias", "up_bias", "down_bias") if problem.expert_bias else ())
        for i, name in enumerate(names):
            shape = getattr(weights[rank], name).shape
            setattr(result.weights, name, np.array([e.grads[i] for e in mine]).reshape(shape))
    return ys, results, scales


def shared_grads(problem, shared, d_gate):
    if shared is None:
        return moxie.Weights()
    grads = moxie.Weights(shared_gate=shared.grads[0], shared_up=shared.grads[1], shared_down=shared.grads[2])
    if problem.shared.output_gate:
        grads.shared_output_gate = d_gate
    return grads


def close(name, got, want, dtype, *, scale=None, few=False):
    """Relative L2 over the array, and every element against the size of its row: a wrong row must fail.

    `few`: sums over a handful of tokens, whose BF16 rounding does not average out. `scale`: bounds of each element's
    sum, for scalar products that may cancel; then each element is judged against its own.
    """
    got = widen(got)
    assert got.shape == want.shape, f"{name}: {got.shape}, wanted {want.shape}"
    if want.size == 0:
        return
    bf16 = dtype == moxie.DType.bf16
    if scale is not None:
        error = np.abs(got - want) - (5e-3 if bf16 else 1e-5) * scale
    else:
        # The C++ tests, with more tokens, hold 5e-3.
        limit, each = ((1e-2, 4e-2) if few else (8e-3, 2e-2)) if bf16 else (2e-5, 2e-4)
        distance, norm = np.linalg.norm(got - want), np.linalg.norm(want)
        assert distance <= limit * norm, f"{name}: relative L2 {distance / (norm or 1)}"
        rows = want.reshape(-1, want.shape[-1])
        rms = np.sqrt(np.mean(rows**2, axis=1, keepdims=True))
        usual = np.sqrt(np.mean(rows**2))  # of a row whose routes cancel, its terms' size
        error = np.abs(got.reshape(rows.shape) - rows) - each * (np.maximum(rms, usual) + np.abs(rows))
    worst = np.unravel_index(np.argmax(error), error.shape)
    assert error[worst] <= 0, (
        f"{name}: {got.reshape(error.shape)[worst]} at {worst}, wanted {want.reshape(error.shape)[worst]}"
    )
