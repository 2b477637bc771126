"""Ranks as processes of a torch.distributed group, dense weights under DDP: any number of processes trains the same
model."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import moxie  # noqa: E402

PROGRAM = Path(__file__).with_name("group_ranks.py")


def run(num_ranks, backend):
    """What each rank prints."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    processes = []
    for rank in range(num_ranks):
        env = {**os.environ, "RANK": str(rank), "WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "127.0.0.1"}
        env |= {"MASTER_PORT": str(port), "OMP_NUM_THREADS": "1", "LOCAL_RANK": str(rank)}
        command = [sys.executable, str(PROGRAM), backend]
        processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env))
    answers = []
    try:
        for p in processes:
            out, err = p.communicate(timeout=180)
            assert p.returncode == 0, err
            answers.append(json.loads(out.splitlines()[-1]))
    finally:
        for p in processes:
            p.kill()
    return answers


def check(answers, alone, rel):
    assert alone["losses"][-1] < 0.8 * alone["losses"][0]
    for answer in answers:
        assert answer["losses"] == pytest.approx(alone["losses"], rel=rel)
        assert answer["shared"] == answers[0]["shared"], "DDP keeps the dense weights equal"


def test_gloo():
    (alone,) = run(1, "gloo")
    for num_ranks in (2, 3):
        check(run(num_ranks, "gloo"), alone, 1e-4)


@pytest.mark.skipif(
    not hasattr(moxie.World, "nccl") or torch.cuda.device_count() < 2, reason="no World.nccl, or less than two GPUs"
)
def test_nccl():
    (alone,) = run(1, "nccl")
    check(run(2, "nccl"), alone, 2e-2)
