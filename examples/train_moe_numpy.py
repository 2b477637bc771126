#!/usr/bin/env python3
"""Trains a tiny byte-level Mixture-of-Experts language model on the Python standard library's sources.

NumPy and the CPU twin only. The model sees the last 8 bytes: embeddings, one matrix per distance, a residual MoE block,
a head. The MoE layer is moxie.Layer over several ranks; the dense part around it is plain NumPy with its backward pass
written by hand. Experts live on one rank each; the dense part is the same everywhere, so here it is computed once.

    python examples/train_moe_numpy.py --steps 200
"""

import argparse
import sysconfig
import time
from pathlib import Path

import numpy as np

import moxie

CONTEXT = 8  # bytes that a prediction sees
NUM_BYTES = 256
BALANCE = 0.01  # weight of the load-balancing loss


def read_text(limit):
    """Bytes of the standard library's top-level modules."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = b"".join(f.read_bytes() for f in files)[:limit]
    return np.frombuffer(text, np.uint8)


def softmax(logits):
    p = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return p / p.sum(axis=-1, keepdims=True)


def norm_forward(x, gain):
    scale = 1 / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + 1e-6)
    return x * scale * gain, scale


def norm_backward(dy, x, gain, scale):
    """Returns dx, dgain of norm_forward."""
    unit, dunit = x * scale, dy * gain
    dx = scale * (dunit - unit * np.mean(dunit * unit, axis=-1, keepdims=True))
    return dx, np.sum(dy * unit, axis=0)


class Adam:
    def __init__(self, arrays, *, rate):
        self.arrays, self.rate, self.step_idx = arrays, rate, 0
        self.moments = [(np.zeros_like(a), np.zeros_like(a)) for a in arrays]

    def step(self, grads):
        self.step_idx += 1
        rate = self.rate * np.sqrt(1 - 0.99**self.step_idx) / (1 - 0.9**self.step_idx)
        for array, grad, (mean, square) in zip(self.arrays, grads, self.moments, strict=True):
            mean += 0.1 * (grad - mean)
            square += 0.01 * (grad * grad - square)
            array -= rate * mean / (np.sqrt(square) + 1e-8)


class Model:
    """All arrays are float32; T is the number of tokens of all ranks together."""

    def __init__(self, world, *, tokens, hidden, intermediate, experts, top_k, rng):
        self.problem = moxie.Problem(
            num_ranks=world.num_ranks,
            max_tokens=tokens,
            hidden=hidden,
            intermediate=intermediate,
            num_experts=experts,
            top_k=top_k,
            dtype=moxie.DType.f32,
        )
        self.layer = moxie.Layer(world, self.problem)

        def random(*shape, fan_in):
            return (rng.standard_normal(shape) * fan_in**-0.5).astype(np.float32)

        self.embed = random(NUM_BYTES, hidden, fan_in=1)  # [256, H]
        self.mix = random(CONTEXT * hidden, hidden, fan_in=CONTEXT * hidden)  # [8 H, H]
        self.gain, self.gain_out = np.ones((2, hidden), np.float32)  # [H] each
        self.router = random(hidden, experts, fan_in=hidden)  # [H, E]
        self.head = random(hidden, NUM_BYTES, fan_in=hidden)  # [H, 256]
        self.experts = []
        for rank in range(world.num_ranks):
            n = len(self.problem.experts_of(rank))
            self.experts.append(
                moxie.Weights(
                    gate=random(n, intermediate, hidden, fan_in=hidden),
                    up=random(n, intermediate, hidden, fan_in=hidden),
                    down=random(n, hidden, intermediate, fan_in=intermediate),
                )
            )

    def arrays(self):
        dense = [self.embed, self.mix, self.gain, self.gain_out, self.router, self.head]
        return dense + [a for w in self.experts for a in (w.gate, w.up, w.down)]

    def per_rank(self, array):
        return np.split(array, self.problem.num_ranks)  # equal parts, contiguous, no copies

    def loss_and_grads(self, window, target):
        """window [T, 8] bytes, oldest last; target [T]. Returns mean cross entropy in nats, gradients as arrays()."""
        num_tokens, num_experts = len(target), self.problem.num_experts
        rows = np.arange(num_tokens)
        # Forward: embeddings, router, experts, head.
        seen = self.embed[window].reshape(num_tokens, -1)  # [T, 8 H]
        h = seen @ self.mix
        x, scale = norm_forward(h, self.gain)
        p = softmax(x @ self.router)  # [T, E]
        ids = np.argsort(-p, axis=1, kind="stable")[:, : self.problem.top_k].astype(np.int32)
        chosen = np.ascontiguousarray(np.take_along_axis(p, ids, axis=1))
        y, context = self.layer.forward(
            x=self.per_rank(x),
            expert_ids=self.per_rank(ids),
            route_weights=self.per_rank(chosen),
            weights=self.experts,
        )
        h_out = h + np.concatenate(y)
        x_out, scale_out = norm_forward(h_out, self.gain_out)
        q = softmax(x_out @ self.head)  # [T, 256]
        loss = -np.mean(np.log(q[rows, target]))

        # Backward, in reverse.
        dq = q
        dq[rows, target] -= 1
        dq /= num_tokens
        d_head = x_out.T @ dq
        dh, d_gain_out = norm_backward(dq @ self.head.T, h_out, self.gain_out, scale_out)
        grads = self.layer.backward(context, x=self.per_rank(x), dy=self.per_rank(dh), weights=self.experts)
        dp = np.zeros_like(p)
        np.put_along_axis(dp, ids, np.concatenate([g.d_route_weights for g in grads]), axis=1)
        share = np.bincount(ids.reshape(-1), minlength=num_experts) / ids.size  # of the routes, by expert
        dp += (BALANCE * num_experts / num_tokens * share).astype(np.float32)
        d_logits = p * (dp - np.sum(dp * p, axis=1, keepdims=True))
        dx = np.concatenate([g.dx for g in grads]) + d_logits @ self.router.T
        d_norm, d_gain = norm_backward(dx, h, self.gain, scale)
        dh += d_norm
        d_embed = np.zeros_like(self.embed)
        np.add.at(d_embed, window.reshape(-1), (dh @ self.mix.T).reshape(window.size, -1))
        dense = [d_embed, seen.T @ dh, d_gain, d_gain_out, x.T @ d_logits, d_head]
        return loss, dense + [a for g in grads for a in (g.weights.gate, g.weights.up, g.weights.down)]


def train(*, steps, ranks, tokens, hidden, intermediate, experts, top_k, rate, seed, every=10):
    """Returns the loss of every step."""
    rng = np.random.default_rng(seed)
    text = read_text(4_000_000)
    losses, began = [], time.perf_counter()
    with moxie.World.cpu(num_ranks=ranks) as world:
        model = Model(
            world,
            tokens=tokens,
            hidden=hidden,
            intermediate=intermediate,
            experts=experts,
            top_k=top_k,
            rng=rng,
        )
        adam = Adam(model.arrays(), rate=rate)
        for step in range(steps):
            at = rng.integers(CONTEXT, len(text), size=ranks * tokens)
            window = text[at[:, None] - 1 - np.arange(CONTEXT)]
            loss, grads = model.loss_and_grads(window, text[at])
            adam.step(grads)
            losses.append(float(loss))
            if every and (step % every == 0 or step == steps - 1):
                speed = (step + 1) * ranks * tokens / (time.perf_counter() - began)
                print(f"step {step:5}  loss {loss:.3f} nats per byte  {speed:7.0f} tokens/s", flush=True)
    return losses


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, value, words in (
        ("steps", 200, "optimiser steps"),
        ("ranks", 2, "ranks that share the experts"),
        ("tokens", 512, "bytes to predict per rank and step"),
        ("hidden", 64, "H, a multiple of 64"),
        ("intermediate", 128, "I of each expert, a multiple of 64"),
        ("experts", 8, "E over all ranks"),
        ("top-k", 2, "experts of each token"),
        ("seed", 1, "of weights and batches"),
    ):
        parser.add_argument(f"--{name}", type=int, default=value, help=f"{words} [{value}]")
    parser.add_argument("--rate", type=float, default=3e-3, help="of Adam [0.003]")
    losses = train(**vars(parser.parse_args()))
    first, last = losses[0], float(np.mean(losses[-10:]))
    print(f"loss {first:.3f} -> {last:.3f} (mean of the last 10 steps)")
    return 0 if last < first else 1


if __name__ == "__main__":
    raise SystemExit(main())
