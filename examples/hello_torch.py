#!/usr/bin/env python3
"""The smallest whole program with PyTorch: one MoE layer with a router, forward and backward, on a GPU or the CPU."""

import moxie.torch as mt
import torch

import moxie

world = mt.local_world()  # one rank on this GPU, or on the CPU; mt.world_from_group() makes ranks of processes
device = "cuda" if world.backend == "cuda" else "cpu"
problem = moxie.Problem(max_tokens=512, hidden=128, intermediate=256, num_experts=8, top_k=2)

router = mt.TopKRouter(128, 8, 2, device=device)
layer = mt.MoE(problem, world, router=router)
x = torch.randn(4, 100, 128, dtype=torch.bfloat16, device=device, requires_grad=True)
y = layer(x)
y.float().square().mean().backward()
world.synchronize()  # errors of GPU passes are thrown here
print(tuple(y.shape), tuple(x.grad.shape), tuple(layer.down.grad.shape), tuple(router.weight.grad.shape))
