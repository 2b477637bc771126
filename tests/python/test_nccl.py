"""Ranks with a process and a GPU each, over NCCL. Skips without two GPUs, without PyTorch or NCCL, or where the package
was built without CUDA; run by hand: pytest tests/python/test_nccl.py"""

import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest

import moxie

WAIT_S = 120


def test_refuses_before_it_looks_for_nccl():
    with pytest.raises(moxie.InvalidArgumentError, match="rank of a NCCL world is 2, must be between 0 and 1"):
        moxie.World.nccl(rank=2, num_ranks=2, unique_id=bytes(128))
    with pytest.raises(moxie.InvalidArgumentError, match="unique_id of a NCCL world has 3 bytes, must have 128"):
        moxie.World.nccl(rank=0, num_ranks=2, unique_id=b"abc")
    with pytest.raises(moxie.InvalidArgumentError, match="unique_id of a NCCL world has 0 bytes"):
        moxie.World.nccl(rank=0, num_ranks=2)


@pytest.mark.skipif(moxie.has_cuda, reason="a package with CUDA")
def test_needs_a_build_with_cuda():
    with pytest.raises(moxie.UnavailableError, match="World::nccl was called on a build without CUDA"):
        moxie.World.nccl(rank=0, num_ranks=2, unique_id=bytes(128))
    with pytest.raises(moxie.UnavailableError, match="nccl_unique_id was called on a build without CUDA"):
        moxie.nccl_unique_id()


@pytest.fixture
def ranks():
    torch = pytest.importorskip("torch")
    if not moxie.has_cuda or torch.cuda.device_count() < 2:
        pytest.skip("fewer than two GPUs, or a package without CUDA")
    import nccl_ranks

    path = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(path)
    spawn = multiprocessing.get_context("spawn")

    class Ranks:
        Event = spawn.Event
        make_problem, make_inputs = nccl_ranks.make_problem, nccl_ranks.make_inputs

        @staticmethod
        def start(function, *args):
            here, there = spawn.Pipe(duplex=False)
            process = spawn.Process(target=nccl_ranks.child, args=(there, function, args), daemon=True)
            process.start()
            there.close()
            return process, here

        @staticmethod
        def finish(process, pipe):
            assert pipe.poll(WAIT_S), f"process {process.pid} said nothing"
            answer = pipe.recv()
            process.join(WAIT_S)
            return answer

        @classmethod
        def run(cls, function, *args):
            unique_id = moxie.nccl_unique_id()
            running = [cls.start(function, r, 2, unique_id, *args) for r in range(2)]
            return [cls.finish(*one) for one in running]

    return Ranks


def in_one_process(ranks, tokens, seed):
    torch = pytest.importorskip("torch")
    with moxie.World.cuda(num_ranks=2, devices=[0, 0], timeout_s=30.0) as world:
        layer = moxie.Layer(world, ranks.make_problem(2))
        parts = [ranks.make_inputs(layer.problem, r, "cuda:0", tokens[r], seed) for r in range(2)]
        inputs = {name: [part[name][0] for part in parts] for name in parts[0]}
        y = [torch.full_like(x, float("nan")) for x in inputs["x"]]
        torch.cuda.synchronize()
        layer.infer(**inputs, out=y)
        world.synchronize()
        return [t.view(torch.int16).cpu().numpy() for t in y]


def check_bits(ranks, tokens, seed):
    answers = ranks.run("passes", tokens, seed)
    for (kind, got), want in zip(answers, in_one_process(ranks, tokens, seed), strict=True):
        assert kind == "result", got
        assert (got == want).all()


@pytest.mark.parametrize("tokens", [(160, 37), (0, 64)])
def test_same_bits_as_one_process(ranks, tokens, seed):
    check_bits(ranks, tokens, seed)


def test_mismatch_is_found_on_every_rank(ranks):
    for kind, error in ranks.run("make_layer"):
        assert kind == "error" and error[0] == "InvalidArgumentError", error
        assert "the layer of rank 1 is" in error[1] and "must be the same on every rank" in error[1]


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_process_is_reported(ranks, victim, seed):
    unique_id = moxie.nccl_unique_id()
    events = [ranks.Event() for _ in range(2)]
    running = [ranks.start("until_lost", r, 2, unique_id, (160, 37), seed, events[r]) for r in range(2)]
    assert all(event.wait(WAIT_S) for event in events)
    time.sleep(0.2)
    os.kill(running[victim][0].pid, signal.SIGKILL)
    killed = time.monotonic()
    kind, answer = ranks.finish(*running[1 - victim])
    assert kind == "result", answer
    at, waits, total, _ = answer
    assert at - killed < 2.0 + 2.0 and waits == [1 - victim] and total == 8
    check_bits(ranks, (160, 37), seed)  # at once again
