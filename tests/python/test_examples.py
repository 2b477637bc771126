"""The examples run. The training one has right gradients, and its loss falls."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import moxie

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
EXAMPLE = EXAMPLES / "train_moe_numpy.py"


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("train_moe_numpy", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_gradients_are_slopes_of_the_loss(example, rng):
    """Central differences along each gradient. K = E, so that no step changes the routing."""
    with moxie.World.cpu(num_ranks=2) as world:
        model = example.Model(world, tokens=16, hidden=64, intermediate=64, experts=4, top_k=4, rng=rng)
        example.BALANCE = 0.0  # its gradient is that of another loss
        window, target = rng.integers(256, size=(32, 8)), rng.integers(256, size=32)
        _, grads = model.loss_and_grads(window, target)
        for array, grad in zip(model.arrays(), grads, strict=True):
            direction = grad / (np.linalg.norm(grad) or 1)
            step = 3e-3
            saved = array.copy()
            array += step * direction
            after, _ = model.loss_and_grads(window, target)
            array[...] = saved - step * direction
            before, _ = model.loss_and_grads(window, target)
            array[...] = saved
            slope = (float(after) - float(before)) / (2 * step)
            assert slope == pytest.approx(np.linalg.norm(grad), rel=0.05, abs=1e-3)


def test_loss_falls():
    run = subprocess.run(
        [sys.executable, EXAMPLE, "--steps", "25", "--tokens", "256"], capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stdout + run.stderr
    first, last = run.stdout.splitlines()[-1].split("(")[0].split()[1::2]
    assert float(first) > 5.3 and float(last) < 4.2, run.stdout


def test_hello():
    run = subprocess.run([sys.executable, EXAMPLES / "hello_numpy.py"], capture_output=True, text=True)
    assert run.returncode == 0 and run.stdout == "[(5, 64), (2, 64)] (5, 64) (2, 128, 64)\n", run.stdout + run.stderr
