"""What the processes of tests/python/test_nccl.py do: one rank each, with a GPU of its own."""

import importlib
import os
import time

import moxie

torch = importlib.import_module("torch")  # the tests of the package do not need it, these do

H, WIDTH, K, EXPERTS, MAX_TOKENS = 256, 192, 2, 6, 160


def make_problem(num_ranks):
    return moxie.Problem(
        num_ranks=num_ranks,
        max_tokens=MAX_TOKENS,
        hidden=H,
        intermediate=WIDTH,
        num_experts=EXPERTS,
        top_k=K,
        dtype=moxie.DType.bf16,
    )


def make_inputs(problem, rank, device, tokens, seed):
    """One rank's arguments; the same on every GPU, for the numbers come from the CPU."""
    g = torch.Generator().manual_seed(1000 * seed + rank)
    n = len(problem.experts_of(rank))

    def bf16(*shape):
        return (torch.randn(*shape, generator=g) * shape[-1] ** -0.5).bfloat16().to(device)

    return {
        "x": [bf16(tokens, H)],
        "expert_ids": [torch.randint(-1, EXPERTS, (tokens, K), generator=g).to(device)],
        "route_weights": [torch.rand(tokens, K, generator=g).to(device)],
        "weights": [moxie.Weights(gate=bf16(n, WIDTH, H), up=bf16(n, WIDTH, H), down=bf16(n, H, WIDTH))],
    }


def child(pipe, function, args):
    """Runs one of the functions below and sends what it returns or raises."""
    try:
        pipe.send(("result", globals()[function](*args)))
    except Exception as error:
        pipe.send(("error", (type(error).__name__, str(error))))


def world_of(rank, num_ranks, unique_id, **options):
    torch.cuda.set_device(rank)
    return moxie.World.nccl(
        rank=rank, num_ranks=num_ranks, unique_id=unique_id, device=rank, **{"timeout_s": 30.0, **options}
    )


def passes(rank, num_ranks, unique_id, tokens, seed):
    with world_of(rank, num_ranks, unique_id) as world:
        assert list(world.local_ranks) == [rank]
        layer = moxie.Layer(world, make_problem(num_ranks))
        inputs = make_inputs(layer.problem, rank, f"cuda:{rank}", tokens[rank], seed)
        y = [torch.full_like(inputs["x"][0], float("nan"))]
        torch.cuda.synchronize()
        for _ in range(3):
            layer.infer(**inputs, out=y)
        world.synchronize()
        result = y[0].view(torch.int16).cpu().numpy()
    world.close()  # a second time
    return result


def make_layer(rank, num_ranks, unique_id):
    with world_of(rank, num_ranks, unique_id) as world:
        problem = make_problem(num_ranks)
        if rank == 1:
            problem = moxie.Problem(
                num_ranks=num_ranks,
                max_tokens=MAX_TOKENS,
                hidden=2 * H,
                intermediate=WIDTH,
                num_experts=EXPERTS,
                top_k=K,
                dtype=moxie.DType.bf16,
            )
        moxie.Layer(world, problem)


def until_lost(rank, num_ranks, unique_id, tokens, seed, started):
    with world_of(rank, num_ranks, unique_id, timeout_s=2.0) as world:
        layer = moxie.Layer(world, make_problem(num_ranks))
        inputs = make_inputs(layer.problem, rank, f"cuda:{rank}", tokens[rank], seed)
        y = [torch.empty_like(inputs["x"][0])]
        torch.cuda.synchronize()
        layer.infer(**inputs, out=y)
        world.synchronize()
        started.set()
        try:
            while True:
                layer.infer(**inputs, out=y)
                world.synchronize()
        except moxie.WaitTimeoutError as error:
            at, waits = time.monotonic(), [w.rank for w in error.waits]
    torch.cuda.synchronize()
    return at, waits, torch.ones(8, device=f"cuda:{rank}").sum().item(), os.getpid()
