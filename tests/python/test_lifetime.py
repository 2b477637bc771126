"""Who keeps whom alive, what close() does, and that passes let other Python threads run."""

import gc
import subprocess
import sys
import threading
import time
import weakref

import numpy as np
import pytest
from cases import make_case, make_problem, same_bits

import moxie

PROBLEM = make_problem(ranks=2, max_tokens=16)


@pytest.fixture
def case(rng):
    return make_case(PROBLEM, rng, tokens=(9, 4))


def test_context_keeps_layer_and_layer_keeps_world(case):
    def start():
        layer = moxie.Layer(moxie.World.cpu(num_ranks=2), PROBLEM)
        return layer.forward(**case.inputs)[1]

    context = start()
    gc.collect()
    assert context.layer.world.num_ranks == 2 and context.num_bytes > 0
    context.layer.backward(context, **case.backward_inputs)


def test_everything_is_freed(case):
    world = moxie.World.cpu(num_ranks=2)
    layer = moxie.Layer(world, PROBLEM)
    x = [weakref.ref(a) for a in case.x]
    _, context = layer.forward(**case.inputs)
    case.x.clear()
    assert all(r() is None for r in x)  # a pass keeps no input
    del world, layer, context
    gc.collect()


@pytest.mark.parametrize("close", ["world", "layer"])
def test_use_after_close(close, case):
    world = moxie.World.cpu(num_ranks=2)
    layer = moxie.Layer(world, PROBLEM)
    _, context = layer.forward(**case.inputs)
    (world if close == "world" else layer).close()
    (world if close == "world" else layer).close()  # twice is legal
    name = close.capitalize()
    uses = [
        lambda: layer.forward(**case.inputs),
        lambda: layer.infer(**case.inputs),
        lambda: layer.backward(context, **case.backward_inputs),
        lambda: layer.input_buffer(0),
        lambda: layer.memory(),
    ]
    for use in uses:
        with pytest.raises(moxie.ClosedError, match=f"was called on a {name} that is closed"):
            use()
    with pytest.raises(moxie.ClosedError, match="Context whose Layer or World is closed"):
        _ = context.num_bytes
    assert layer.closed and layer.problem == PROBLEM and "closed" in repr(layer)
    if close == "world":
        for use in (world.reset, world.describe_gemm, lambda: world.num_ranks, lambda: moxie.Layer(world, PROBLEM)):
            with pytest.raises(moxie.ClosedError):
                use()
        assert world.closed
    else:
        with moxie.Layer(world, PROBLEM) as other:
            other.infer(**case.inputs)
        with pytest.raises(moxie.ClosedError):
            other.infer(**case.inputs)


def test_input_buffer_outlives_close(case):
    world = moxie.World.cpu(num_ranks=2)
    buffer = moxie.Layer(world, PROBLEM).input_buffer(1)
    buffer[:] = 3
    world.close()
    del world
    gc.collect()
    assert np.all(buffer == 3)


def test_no_layer_moves_a_buffer_in_use():
    with moxie.World.cpu(num_ranks=2) as world:
        layer = moxie.Layer(world, PROBLEM)
        buffer = layer.input_buffer(0)
        larger = make_problem(ranks=2, max_tokens=64)
        with pytest.raises(moxie.InvalidArgumentError, match="1 arrays of input_buffer are alive"):
            moxie.Layer(world, larger)
        moxie.Layer(world, PROBLEM)  # needs no more than there is
        del buffer
        moxie.Layer(world, larger)


def test_context_of_a_failed_pass_is_refused(case):
    with moxie.World.cpu(num_ranks=2) as world:
        layer = moxie.Layer(world, PROBLEM)
        _, context = layer.forward(**case.inputs)
        case.expert_ids[0][0, 0] = 99
        with pytest.raises(moxie.InvalidRouteError):
            layer.forward(**case.inputs, context=context)
        with pytest.raises(ValueError, match="must come from a forward pass that succeeded"):
            layer.backward(context, **case.backward_inputs)


def test_the_gil_is_released_during_a_pass(case):
    late = moxie.FaultInjection(late_rank=0, late_ms=1500)
    with moxie.World.cpu(num_ranks=2, faults=late) as world:
        layer = moxie.Layer(world, PROBLEM)
        times = {}

        def work():
            times["began"] = time.monotonic()
            layer.infer(**case.inputs)
            times["ended"] = time.monotonic()

        thread = threading.Thread(target=work)
        thread.start()
        time.sleep(0.5)  # the pass waits for its late rank
        here = time.monotonic()
        for close in (world.close, layer.close):
            with pytest.raises(moxie.InvalidArgumentError, match="1 of its passes run in another thread"):
                close()
        with pytest.raises(ValueError, match="one at a time"):
            layer.infer(**case.inputs)
        thread.join()
        assert times["began"] < here < times["ended"]


def test_two_worlds_in_two_threads(case):
    results = {}

    def work(key):
        with moxie.World.cpu(num_ranks=2) as world:
            layer = moxie.Layer(world, PROBLEM)
            for _ in range(20):
                results[key] = layer.infer(**case.inputs)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(same_bits(a, b) for a, b in zip(results[0], results[1], strict=True))


def test_exit_with_everything_alive():
    code = (
        "import moxie\n"
        "p = moxie.Problem(max_tokens=4, hidden=64, intermediate=64, num_experts=2, top_k=1)\n"
        "w = moxie.World.cpu(); l = moxie.Layer(w, p); b = l.input_buffer(0)\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0 and run.stderr == ""


def test_numpy_only_use_imports_nothing_else():
    code = (
        "import sys, moxie\n"
        "bad = {'torch', 'safetensors', 'ml_dtypes', 'nanobind'} & set(sys.modules)\n"
        "assert not bad, bad\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
