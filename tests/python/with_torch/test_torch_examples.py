"""The examples with PyTorch run; both layers of the training example have the same losses, on any number of ranks."""

import json
import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

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
    runs = {}
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    for name, first, more in (
        ("one", [], ["--layer", "both"]),
        ("two", launch, ["--layer", "moxie", "--batch", "2"]),
    ):
        file = tmp_path / f"{name}.json"
        out = run(*first, EXAMPLES / "train_moe_lm.py", *SMALL, "--dtype", "f32", *more, "--json", file)
        runs[name] = json.loads(file.read_text())["runs"]
        assert "moxie loss " in out
    moxie, nccl = runs["one"]
    assert (moxie["layer"], nccl["layer"]) == ("moxie", "nccl")
    assert moxie["losses"][-1] < moxie["losses"][0] - 1.2
    assert moxie["losses"] == pytest.approx(nccl["losses"], rel=1e-4)
    assert moxie["losses"] == pytest.approx(runs["two"][0]["losses"], rel=5e-3)
    for r in (moxie, nccl):
        assert 0 < r["layers_ms"] < r["step_ms"] and r["tokens_per_s"] > 0
    run(EXAMPLES / "plot_losses.py", tmp_path / "one.json", tmp_path / "losses.svg")
    curves = ElementTree.parse(tmp_path / "losses.svg").getroot().iter("{http://www.w3.org/2000/svg}polyline")
    assert [len(c.get("points").split()) for c in curves] == [12, 12]
