"""What the processes of tests/python/test_processes.py do: each function is one rank's program."""

import time

import numpy as np
from cases import Case, make_case

import moxie


def child(pipe, function, args):
    """Runs one of the functions below and sends what it returns or raises."""
    try:
        pipe.send(("result", globals()[function](*args)))
    except Exception as error:
        pipe.send(("error", (type(error).__name__, str(error))))


def scene_case(problem, tokens, routing, seed):
    """The same on every rank."""
    return make_case(problem, np.random.default_rng(seed), tokens=tokens, routing=routing)


def make_problem(options):
    """`shared` and `limit` stand for the parts that cannot be sent to another process."""
    rest = {k: v for k, v in options.items() if k not in ("shared", "limit")}
    return moxie.Problem(
        **rest,
        shared=moxie.SharedExpert(intermediate=options.get("shared", 0), output_gate="shared" in options),
        activation=moxie.Activation(kind=moxie.ActivationKind.swiglu_clamped, limit=options.get("limit", 1.5)),
    )


def part(case: Case, rank):
    """One rank's arguments of forward and backward."""
    one = Case(case.problem, *([getattr(case, n)[rank]] for n in ("x", "expert_ids", "route_weights", "weights", "dy")))
    return one.inputs, one.backward_inputs


def passes(rank, num_ranks, name, options, plans, tokens, routing, seed):
    """Forward and backward under several plans, layers made and closed on the way; returns the last arrays."""
    results = []
    with moxie.World.cpu_process(rank=rank, num_ranks=num_ranks, name=name, timeout_s=30) as world:
        assert list(world.local_ranks) == [rank] and world.num_ranks == num_ranks
        problem = make_problem(options)
        inputs, backward_inputs = part(scene_case(problem, tokens, routing, seed), rank)
        for plan in plans:
            with moxie.Layer(world, problem, moxie.Plan(**plan)) as layer:
                for _ in range(3):
                    (y,), context = layer.forward(**inputs)
                    (grads,) = layer.backward(context, **backward_inputs)
            weights = [getattr(grads.weights, n) for n in moxie.Weights.__slots__]
            results.append([y, grads.dx, grads.d_route_weights, *[w for w in weights if w is not None]])
    return results


def make_layer(rank, num_ranks, name, options):
    with moxie.World.cpu_process(rank=rank, num_ranks=num_ranks, name=name, timeout_s=5) as world:
        moxie.Layer(world, make_problem(options))


def make_world(rank, num_ranks, name, timeout_s):
    moxie.World.cpu_process(rank=rank, num_ranks=num_ranks, name=name, timeout_s=timeout_s).close()


def bad_route_then_good(rank, num_ranks, name, options, seed):
    """Rank 1 has an expert id that does not exist; every rank hears of it, and goes on."""
    problem = make_problem(options)
    inputs, _ = part(scene_case(problem, (4,) * num_ranks, "random", seed), rank)
    with moxie.World.cpu_process(rank=rank, num_ranks=num_ranks, name=name, timeout_s=10) as world:
        layer = moxie.Layer(world, problem)
        good = inputs["expert_ids"][0].copy()
        if rank == 1:
            inputs["expert_ids"][0][0, 0] = 99
        try:
            layer.infer(**inputs)
            return "no error"
        except moxie.InvalidRouteError as error:
            sentence = error.what
        inputs["expert_ids"][0][...] = good
        layer.infer(**inputs)
    return sentence


def bad_arrays_then_good(rank, num_ranks, name, options, seed):
    """Rank 1 has arrays that the package refuses, then ones that the library refuses; returns what each rank hears of
    each, and how soon, and whether the pass after them has the bits of the one before."""
    problem = make_problem(options)
    inputs, _ = part(scene_case(problem, (4,) * num_ranks, "random", seed), rank)
    weights = inputs["route_weights"][0]
    heard = []
    with moxie.World.cpu_process(rank=rank, num_ranks=num_ranks, name=name, timeout_s=30) as world:
        layer = moxie.Layer(world, problem)
        (want,) = layer.infer(**inputs)
        for bad in (weights.astype(np.float64), weights.tolist(), weights[:, :1].copy()):
            begin = time.monotonic()
            try:
                layer.infer(**{**inputs, "route_weights": [bad if rank == 1 else weights]})
            except moxie.Error as error:
                heard.append((type(error).__name__, error.what, time.monotonic() - begin))
        (y,) = layer.infer(**inputs)
    return heard, bool((y == want).all())


def until_lost(rank, num_ranks, name, options, seed, started):
    """Passes without end; returns when the loss of a peer was reported, and as what."""
    problem = make_problem(options)
    inputs, _ = part(scene_case(problem, (4,) * num_ranks, "random", seed), rank)
    world = moxie.World.cpu_process(rank=rank, num_ranks=num_ranks, name=name, timeout_s=1.0)
    layer = moxie.Layer(world, problem)
    layer.infer(**inputs)
    started.set()
    try:
        while True:
            layer.infer(**inputs)
    except moxie.WaitTimeoutError as error:
        at, waits = time.monotonic(), [w.rank for w in error.waits]
        try:
            world.reset()
            return at, waits, "reset went well"
        except moxie.WaitTimeoutError as gone:
            return at, waits, gone.what
