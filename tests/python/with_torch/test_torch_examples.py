"""The examples with PyTorch run; both layers of the training example have the same losses, on any number of ranks."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", minversion="2.10", reason="PyTorch 2.10 is not installed")

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
SMALL = ["--steps", "12", "--batch", "4", "--length", "32", "--hidden", "64", "--every", "0", "--device", "cpu"]


def run(*command):
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *map(str, command)], capture_output=True, text=True, timeout=300, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_hello():
    assert run(EXAMPLES / "hello_torch.py") == "(4, 100, 128) (4, 100, 128) (8, 128, 256) (8, 128)\n"


def test_training(tmp_path):
    losses = {}
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    for name, first, more in (
        ("one", [], ["--layer", "moxie", "--plot", tmp_path / "loss.png"]),
        ("one nccl", [], ["--layer", "nccl"]),
        ("two", launch, ["--layer", "moxie", "--batch", "2"]),
    ):
        out = run(*first, EXAMPLES / "train_moe_lm.py", *SMALL, "--dtype", "f32", *more, "--json", tmp_path / name)
        losses[name] = json.loads((tmp_path / name).read_text())["losses"]
        assert "loss " in out
    assert losses["one"][-1] < losses["one"][0] - 1.2
    assert losses["one"] == pytest.approx(losses["one nccl"], rel=1e-4)
    assert losses["one"] == pytest.approx(losses["two"], rel=5e-3)
    if importlib.util.find_spec("matplotlib"):
        assert (tmp_path / "loss.png").stat().st_size > 1000
