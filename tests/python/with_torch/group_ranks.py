"""One process of test_torch_group.py: an expert-parallel model under DDP, one rank of a torch.distributed group.

Prints one line of JSON: the losses of a few steps, and a checksum of what must be the same on all ranks. `tokens` of a
step are divided over the ranks, so that every number of processes trains the same model on the same data."""

import json
import sys

import moxie.torch as mt
import torch
import torch.distributed as dist
from plain import DTYPES, make_problem
from torch import nn

import moxie


class Model(nn.Module):
    def __init__(self, world, problem, device):
        super().__init__()
        dtype = DTYPES[problem.dtype]
        self.dense = nn.Linear(64, 64, device=device, dtype=dtype)
        routers = [mt.TopKRouter(64, problem.num_experts, 2, device=device) for _ in range(2)]
        self.layers = nn.ModuleList(mt.MoE(problem, world, router=r, gate_up="fused") for r in routers)

    def forward(self, x):
        x = self.dense(x)
        for layer in self.layers:
            x = x + layer(x)
        return x


def main(backend):
    dist.init_process_group(backend)
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    world = mt.world_from_group(device=device, timeout_s=60)
    assert world.num_ranks == num_ranks and list(world.local_ranks) == [rank]
    torch.manual_seed(3)
    dtype = moxie.DType.bf16 if device.type == "cuda" else moxie.DType.f32
    problem = make_problem(dtype, num_ranks=num_ranks, shared=moxie.SharedExpert(intermediate=64))
    model = Model(world, problem, device)
    mine = mt.expert_parameters(model)
    assert len(mine) == 4 and not any("shared" in name or "router" in name for name in mine)
    if num_ranks > 1:
        mt.ignore_experts_in_ddp(model)
        wrapped = nn.parallel.DistributedDataParallel(model)
    else:
        wrapped = model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    data = torch.randn(4, 24, 64, generator=torch.Generator().manual_seed(7)).to(device, DTYPES[dtype])
    share, losses = 24 // num_ranks, []
    for step in range(6):
        x = data[step % 4, rank * share : (rank + 1) * share]
        optimizer.zero_grad()
        loss = (wrapped(x).float() - 1).square().mean()
        loss.backward()
        mt.scale_expert_grads(model, 1 / num_ranks)
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total.item() / num_ranks)
    world.synchronize()
    shared = [p.detach().double().sum().item() for n, p in model.named_parameters() if n not in mine]
    print(json.dumps({"rank": rank, "losses": losses, "shared": shared}), flush=True)
    dist.barrier()
    world.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
