#!/usr/bin/env python3
"""The smallest whole program: one layer over two ranks, forward and backward, NumPy only."""

import numpy as np

import moxie

rng = np.random.default_rng(1)
problem = moxie.Problem(
    num_ranks=2, max_tokens=8, hidden=64, intermediate=128, num_experts=3, top_k=2, dtype=moxie.DType.f32
)
tokens = (5, 2)  # of each rank


def random(*shape):
    return rng.standard_normal(shape, dtype=np.float32)


weights = []
for rank in range(2):
    n = len(problem.experts_of(rank))  # 2 experts on rank 0, 1 on rank 1
    weights.append(moxie.Weights(gate=random(n, 128, 64), up=random(n, 128, 64), down=random(n, 64, 128)))
x = [random(t, 64) for t in tokens]
expert_ids = [rng.integers(-1, 3, size=(t, 2), dtype=np.int32) for t in tokens]  # -1: no route
route_weights = [np.full((t, 2), 0.5, np.float32) for t in tokens]

with moxie.World.cpu(num_ranks=2) as world:
    layer = moxie.Layer(world, problem)  # plan chosen, memory allocated, all of it checked
    y, context = layer.forward(x=x, expert_ids=expert_ids, route_weights=route_weights, weights=weights)
    grads = layer.backward(context, x=x, dy=y, weights=weights)
    print([a.shape for a in y], grads[0].dx.shape, grads[0].weights.gate.shape)
