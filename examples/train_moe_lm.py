#!/usr/bin/env python3
"""Trains a byte-level Mixture-of-Experts transformer on the Python standard library's sources, with PyTorch.

One process, or one per GPU (or per CPU rank) with torchrun: experts are divided over the ranks, the dense part is the
same on all of them and averaged by DistributedDataParallel. Two MoE layers to compare:
  --layer moxie   moxie.torch.MoE
  --layer nccl    the usual one: sort by expert, all-to-all (NCCL; gloo on CPUs), torch's grouped products, all-to-all
  --layer both    one after the other
Both start from the same weights and see the same bytes, so their losses are the same up to rounding. Without torchrun
there is one rank and no all-to-all.

    python examples/train_moe_lm.py --steps 50
    torchrun --nproc-per-node 2 examples/train_moe_lm.py --layer both --json training.json
    python examples/plot_losses.py training.json losses.svg
"""

import argparse
import json
import os
import sysconfig
import time
from pathlib import Path

import moxie.torch as mt
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import moxie

NUM_BYTES = 256
BALANCE = 0.01  # weight of the load-balancing loss
NUM_TIMED = 10  # steps after the training, in which the layers are timed


def read_text(limit: int) -> torch.Tensor:
    """Bytes of the standard library's top-level modules."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(f.read_bytes() for f in files)[:limit]), dtype=torch.uint8)


class AllToAll(torch.autograd.Function):
    """Rows to other ranks, and their gradients back."""

    @staticmethod
    def forward(ctx, rows, sent, received):
        ctx.sent, ctx.received = sent, received
        out = rows.new_empty(sum(received), *rows.shape[1:])
        exchange(out, rows.contiguous(), received, sent)
        return out

    @staticmethod
    def backward(ctx, grad):
        out = grad.new_empty(sum(ctx.sent), *grad.shape[1:])
        exchange(out, grad.contiguous(), ctx.sent, ctx.received)
        return out, None, None


def exchange(out, rows, received, sent):
    if dist.is_initialized():
        dist.all_to_all_single(out, rows, received, sent)
    else:
        out.copy_(rows)


class NcclMoE(nn.Module):
    """The baseline: the weights of a moxie.torch.MoE, whose passes it never calls."""

    def __init__(self, experts: mt.MoE) -> None:
        super().__init__()
        self.router, self.gate, self.up, self.down = experts.router, experts.gate, experts.up, experts.down
        problem = experts.layer.problem
        self.top_k, self.num_ranks = problem.top_k, problem.num_ranks
        counts = [len(problem.experts_of(r)) for r in range(self.num_ranks)]
        owner = [r for r, count in enumerate(counts) for _ in range(count)]
        self.register_buffer("owner", torch.tensor(owner, device=self.gate.device), persistent=False)
        self.first = problem.experts_of(experts.layer.world.local_ranks[0]).start

    def forward(self, x, expert_ids, route_weights):
        ids, order = expert_ids.reshape(-1).sort(stable=True)  # routes by expert, and so by rank
        token = order // self.top_k
        sent = torch.bincount(self.owner[ids], minlength=self.num_ranks)
        received = torch.empty_like(sent)
        exchange(received, sent, None, None)
        sent, received = sent.tolist(), received.tolist()  # the host waits for the GPU here
        rows = AllToAll.apply(x[token], sent, received)
        arrived = ids.new_empty(len(rows))
        exchange(arrived, ids, received, sent)
        local, by_expert = (arrived - self.first).sort(stable=True)
        ends = torch.bincount(local, minlength=len(self.gate)).cumsum(0).int()

        def product(rows, weights):
            return F.grouped_mm(rows, weights.transpose(1, 2), offs=ends)

        seen = rows[by_expert]
        hidden = F.silu(product(seen, self.gate)) * product(seen, self.up)
        home = AllToAll.apply(product(hidden, self.down)[by_expert.argsort()], received, sent)
        weighted = home.float() * route_weights.reshape(-1)[order, None]
        return torch.zeros_like(x, dtype=torch.float32).index_add(0, token, weighted).to(x.dtype)


class Block(nn.Module):
    """Causal attention, then the MoE layer; both residual."""

    def __init__(self, world, problem, layer: str, heads: int, device) -> None:
        super().__init__()
        dtype = torch.float32 if problem.dtype == moxie.DType.f32 else torch.bfloat16
        h = problem.hidden
        self.heads = heads
        self.norm1, self.norm2 = (nn.RMSNorm(h, device=device, dtype=dtype) for _ in range(2))
        self.qkv = nn.Linear(h, 3 * h, bias=False, device=device, dtype=dtype)
        self.out = nn.Linear(h, h, bias=False, device=device, dtype=dtype)
        router = mt.TopKRouter(h, problem.num_experts, problem.top_k, device=device)
        experts = mt.MoE(problem, world, router=router)
        self.moe = experts if layer == "moxie" else NcclMoE(experts)

    def forward(self, x):
        batch, length, h = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, h))
        tokens = self.norm2(x).view(batch * length, h)
        routing = self.moe.router(tokens)
        y = self.moe(tokens, routing.expert_ids, routing.route_weights)
        return x + y.view(x.shape), mt.load_balancing_loss(routing)


class Model(nn.Module):
    def __init__(self, world, problem, args, layer: str, device) -> None:
        super().__init__()
        dtype = torch.float32 if problem.dtype == moxie.DType.f32 else torch.bfloat16
        h = problem.hidden
        self.embed = nn.Embedding(NUM_BYTES, h, device=device, dtype=dtype)
        self.place = nn.Embedding(args.length, h, device=device, dtype=dtype)
        self.blocks = nn.ModuleList(Block(world, problem, layer, args.heads, device) for _ in range(args.layers))
        self.norm = nn.RMSNorm(h, device=device, dtype=dtype)
        self.head = nn.Linear(h, NUM_BYTES, bias=False, device=device, dtype=dtype)

    def forward(self, window):
        """window [batch, length + 1] bytes. Returns mean cross entropy in nats per byte, balance loss."""
        seen, target = window[:, :-1], window[:, 1:]
        x = self.embed(seen) + self.place.weight[: seen.shape[1]]
        balance = 0.0
        for block in self.blocks:
            x, one = block(x)
            balance = balance + one
        logits = self.head(self.norm(x)).float()
        return F.cross_entropy(logits.flatten(0, 1), target.flatten()), balance / len(self.blocks)


class Clock:
    """Milliseconds between pairs of moments: of the GPU's stream, or of the host for a CPU."""

    def __init__(self, device) -> None:
        self.on_gpu, self.pairs = device.type == "cuda", []

    def begin(self, *_) -> None:
        self.pairs.append([self.moment()])

    def end(self, *_) -> None:
        self.pairs[-1].append(self.moment())

    def moment(self):
        if not self.on_gpu:
            return time.perf_counter() * 1e3
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def total_ms(self) -> float:
        if self.on_gpu:
            torch.cuda.synchronize()
        return sum(a.elapsed_time(b) if self.on_gpu else b - a for a, b in self.pairs)


def time_layers(model, step, device) -> dict[str, float]:
    """Milliseconds of a step, and of its MoE layers, forward and backward, without their routers."""
    layers, whole, hooks = Clock(device), Clock(device), []
    for block in model.blocks:
        hooks += [
            block.moe.register_forward_pre_hook(layers.begin),
            block.moe.register_forward_hook(layers.end),
            block.moe.register_full_backward_pre_hook(layers.begin),
            block.moe.register_full_backward_hook(layers.end),
        ]
    for _ in range(NUM_TIMED):
        whole.begin()
        step()
        whole.end()
    for hook in hooks:
        hook.remove()
    return {"step_ms": whole.total_ms() / NUM_TIMED, "layers_ms": layers.total_ms() / NUM_TIMED}


def train(args, layer: str, world, device) -> dict:
    """Trains one model: losses of all steps, means over ranks, tokens per second, and what the layers take."""
    num_ranks, rank = world.num_ranks, world.local_ranks[0]
    problem = moxie.Problem(
        num_ranks=num_ranks,
        max_tokens=args.batch * args.length,
        hidden=args.hidden,
        intermediate=args.intermediate,
        num_experts=args.experts,
        top_k=args.top_k,
        dtype=moxie.DType.f32 if args.dtype == "f32" else moxie.DType.bf16,
    )
    torch.manual_seed(args.seed)
    model = Model(world, problem, args, layer, device)
    wrapped = model
    if num_ranks > 1:
        mt.ignore_experts_in_ddp(model)
        wrapped = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.rate, betas=(0.9, 0.95), weight_decay=0.0)
    text, generator = read_text(8_000_000), torch.Generator().manual_seed(args.seed)

    def step() -> torch.Tensor:
        at = torch.randint(len(text) - args.length - 1, (num_ranks * args.batch,), generator=generator)
        at = at[rank * args.batch : (rank + 1) * args.batch]
        window = torch.stack([text[i : i + args.length + 1] for i in at.tolist()]).long().to(device)
        optimizer.zero_grad()
        loss, balance = wrapped(window)
        (loss + BALANCE * balance).backward()
        mt.scale_expert_grads(model, 1 / num_ranks)  # their sums go over the tokens of all ranks
        optimizer.step()
        mean = loss.detach().clone()
        if num_ranks > 1:
            dist.all_reduce(mean)
        return mean / num_ranks

    losses, first, began = [], 0, time.perf_counter()

    def speed() -> float:
        seconds = time.perf_counter() - began
        return max(len(losses) - first, 0) * num_ranks * args.batch * args.length / seconds

    for i in range(args.steps):
        losses.append(step())
        if i == 2:  # the first steps choose kernels and make buffers
            world.synchronize()
            first, began = len(losses), time.perf_counter()
        if args.every and rank == 0 and (i % args.every == 0 or i == args.steps - 1):
            print(
                f"{layer:5} step {i:5}  loss {losses[-1].item():.3f} nats per byte  {speed():9.0f} tokens/s", flush=True
            )
    world.synchronize()  # errors of GPU passes are thrown here
    result = {"layer": layer, "losses": torch.stack(losses).tolist(), "tokens_per_s": speed()}
    return {**result, **time_layers(model, step, device)}


def train_all(args) -> list[dict]:
    """One result per layer asked for; --json FILE."""
    num_ranks, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    device = torch.device(args.device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    if num_ranks > 1:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        world = mt.world_from_group(device=device)
    else:
        world = mt.local_world(device)
    layers = ("moxie", "nccl") if args.layer == "both" else (args.layer,)
    runs = [train(args, layer, world, device) for layer in layers]
    if rank == 0 and args.json:
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
        record = {"arguments": vars(args), "ranks": num_ranks, "device": name, "torch": torch.__version__, "runs": runs}
        Path(args.json).write_text(json.dumps(record, indent=1) + "\n")
    if num_ranks > 1:
        dist.barrier()
        dist.destroy_process_group()
    return runs


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    has_gpu = torch.cuda.is_available() and moxie.has_cuda
    parser.add_argument("--layer", choices=("moxie", "nccl", "both"), default="moxie", help="which MoE layer [moxie]")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if has_gpu else "cpu")
    parser.add_argument("--dtype", choices=("f32", "bf16"), default="bf16" if has_gpu else "f32")
    for name, value, words in (
        ("steps", 200, "optimizer steps"),
        ("batch", 8, "texts per rank and step"),
        ("length", 64, "bytes to predict of each"),
        ("layers", 2, "blocks of attention and MoE"),
        ("hidden", 128, "H, a multiple of 64"),
        ("heads", 4, "of attention"),
        ("intermediate", 128, "I of each expert, a multiple of 64"),
        ("experts", 8, "E over all ranks"),
        ("top-k", 2, "experts of each byte"),
        ("seed", 1, "of weights and batches"),
        ("every", 10, "steps between lines; 0: none"),
    ):
        parser.add_argument(f"--{name}", type=int, default=value, help=f"{words} [{value}]")
    parser.add_argument("--rate", type=float, default=2e-3, help="of AdamW [0.002]")
    parser.add_argument("--json", help="file for losses, tokens/s and times")
    lower = True
    for run in train_all(parser.parse_args()):
        losses = run["losses"]
        last = sum(losses[-10:]) / len(losses[-10:])
        lower = lower and last < losses[0]
        if int(os.environ.get("RANK", 0)) == 0:
            layers, whole = run["layers_ms"], run["step_ms"]
            print(
                f"{run['layer']:5} loss {losses[0]:.3f} -> {last:.3f} (mean of the last 10 steps), "
                f"{run['tokens_per_s']:.0f} tokens/s, MoE layers {layers:.2f} of a step's {whole:.2f} ms"
            )
    return 0 if lower else 1


if __name__ == "__main__":
    raise SystemExit(main())
