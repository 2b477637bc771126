"""Ranks as processes: the bits of ranks as threads, one error on every rank, nothing left by a killed process."""

import multiprocessing
import os
import signal
import time
from pathlib import Path

import process_ranks
import pytest
from cases import same_bits

import moxie

# Each rank is a fork of a server that has imported what it needs and has no threads. The server looks for modules by
# the environment, not by this process's sys.path.
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["process_ranks"])
os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
OPTIONS = {"max_tokens": 16, "hidden": 64, "intermediate": 64, "num_experts": 5, "top_k": 2}
LAG = {
    "order": moxie.TaskOrder.lag, "lag_bands": 1, "band_blocks": 1, "x_ring_blocks": 1, "hidden_ring_blocks": 2,
    "chunk_blocks": 1, "backward_ring_blocks": 2, "save": moxie.SavePolicy.none,
}  # fmt: skip
PLANS = [{}, LAG, {"mode": moxie.ExecMode.split}, {"dispatch": moxie.DispatchMode.push, "compute_workers": 2}]


def start(function, *args):
    here, there = SERVER.Pipe(duplex=False)
    process = SERVER.Process(target=process_ranks.child, args=(there, function, args), daemon=True)
    process.start()
    there.close()
    return process, here


def finish(process, pipe, timeout=60):
    assert pipe.poll(timeout), f"process {process.pid} said nothing"
    answer = pipe.recv()
    process.join(timeout)
    return answer


def run_ranks(num_ranks, function, arguments):
    """arguments(rank) of each rank's process; returns ("result" or "error", value) per rank."""
    running = [start(function, *arguments(r)) for r in range(num_ranks)]
    return [finish(*one) for one in running]


@pytest.fixture
def name(request):
    return f"test.{os.getpid()}.{abs(hash(request.node.nodeid)) % 10**8}"


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_same_bits_as_threads(num_ranks, name, seed):
    tokens = (7, 0, 16, 1)[:num_ranks]
    options = {**OPTIONS, "num_ranks": num_ranks, "shared": 64, "dtype": moxie.DType.bf16}
    case = process_ranks.scene_case(process_ranks.make_problem(options), tokens, "holes", seed)
    answers = run_ranks(num_ranks, "passes", lambda r: (r, num_ranks, name, options, PLANS, tokens, "holes", seed))
    with moxie.World.cpu(num_ranks=num_ranks) as world:
        layer = moxie.Layer(world, case.problem)
        y, context = layer.forward(**case.inputs)
        grads = layer.backward(context, **case.backward_inputs)
    for rank, (kind, results) in enumerate(answers):
        assert kind == "result", results
        weights = [getattr(grads[rank].weights, n) for n in moxie.Weights.__slots__]
        wanted = [y[rank], grads[rank].dx, grads[rank].d_route_weights, *[w for w in weights if w is not None]]
        for arrays in results:
            assert all(same_bits(a, b) for a, b in zip(arrays, wanted, strict=True))


MISMATCHES = {
    "another hidden size": ({"hidden": 128}, "the layer of rank 1 is (R=2 T_max=16 H=128"),
    "another clamp": ({"limit": 3.0}, "must be the same on every rank"),
    "illegal on one rank": ({"hidden": 100}, "hidden is 100"),
}


@pytest.mark.parametrize("what", MISMATCHES)
def test_mismatch_is_found_on_every_rank(what, name):
    change, words = MISMATCHES[what]
    options = {**OPTIONS, "num_ranks": 2}
    answers = run_ranks(2, "make_layer", lambda r: (r, 2, name, {**options, **(change if r else {})}))
    for kind, error in answers:
        assert kind == "error" and error[0] == "InvalidArgumentError" and words in error[1], answers


def test_worlds_that_do_not_come_together(name):
    answers = run_ranks(2, "make_world", lambda r: (r, 3, name, 2.0))  # rank 2 never comes
    assert all(
        kind == "error"
        and error == ("WaitTimeoutError", f"rank 2 of 3 did not come to process world '{name}' within 2 s")
        for kind, error in answers
    ), answers
    answers = run_ranks(2, "make_world", lambda r: (r, 2 + r, name, 5.0))
    assert all("says num_ranks 3, rank 0 says 2" in error[1] for _, error in answers), answers
    answers = run_ranks(3, "make_world", lambda r: (min(r, 1), 3, name, 5.0))
    assert all("as rank 1, must be one each" in error[1] for _, error in answers), answers
    with pytest.raises(moxie.WaitTimeoutError, match="rank 1 found no rank 0"):
        moxie.World.cpu_process(rank=1, num_ranks=2, name=name, timeout_s=0.2)
    with pytest.raises(moxie.InvalidArgumentError, match="rank of a CPU process world is 2, must be between 0 and 1"):
        moxie.World.cpu_process(rank=2, num_ranks=2, name=name)
    with pytest.raises(moxie.InvalidArgumentError, match="name of a process world has 0 characters"):
        moxie.World.cpu_process(rank=0, num_ranks=1, name="")


def test_an_invalid_route_reaches_every_rank(name, seed):
    options = {**OPTIONS, "num_ranks": 3}
    answers = run_ranks(3, "bad_route_then_good", lambda r: (r, 3, name, options, seed))
    assert all(kind == "result" for kind, _ in answers), answers
    assert "expert id of rank 1 token 0 slot 0 is 99" in answers[1][1]
    assert "another rank has an expert id" in answers[0][1] and "another rank has an expert id" in answers[2][1]


def test_refused_arrays_are_refused_on_every_rank(name, seed):
    options = {**OPTIONS, "num_ranks": 3}
    answers = run_ranks(3, "bad_arrays_then_good", lambda r: (r, 3, name, options, seed))
    assert all(kind == "result" and len(answer[0]) == 3 and answer[1] for kind, answer in answers), answers
    heard = [answer[0] for _, answer in answers]
    assert [kind for kind, _, _ in heard[1]] == ["InvalidArgumentError", "ArgumentTypeError", "InvalidArgumentError"]
    for i, (_, sentence, _) in enumerate(heard[1]):
        assert sentence.startswith("route_weights of rank 1 is ")
        told = ("InvalidArgumentError", f"the pass was called off: rank 1 refused: {sentence}")
        assert heard[0][i][:2] == told and heard[2][i][:2] == told
    assert all(seconds < 10 for rank in heard for _, _, seconds in rank)


def shared_memory_files():
    """But for the semaphores of this test's events."""
    return sorted(file for file in os.listdir("/dev/shm") if not file.startswith("sem."))


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_process_is_reported_and_leaves_nothing(victim, name, seed):
    before = shared_memory_files()
    options = {**OPTIONS, "num_ranks": 3}
    events = [SERVER.Event() for _ in range(3)]
    running = [start("until_lost", r, 3, name, options, seed, events[r]) for r in range(3)]
    assert all(event.wait(60) for event in events)
    time.sleep(0.2)
    os.kill(running[victim][0].pid, signal.SIGKILL)
    killed = time.monotonic()
    for rank in range(3):
        if rank == victim:
            continue
        kind, answer = finish(*running[rank])
        assert kind == "result", answer
        at, waits, after = answer
        assert at - killed < 1.0 + 2.0 and waits == [rank]
        assert "make a new World" in after and f"rank {victim}" in after
    running[victim][0].join()
    answers = run_ranks(3, "make_world", lambda r: (r, 3, name, 10.0))  # the name is free at once
    assert all(kind == "result" for kind, _ in answers), answers
    assert shared_memory_files() == before
