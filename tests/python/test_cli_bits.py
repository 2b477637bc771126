"""The same inputs through the command and through Python: every result has the same bits.

The command's dumps are read as docs/dump-format.md says. Needs the command (make build, or MOXIE_CLI=path); skipped
without it.
"""

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
from cases import WEIGHT_NAMES, compare_weights, same_bits

import moxie

ROOT = Path(__file__).resolve().parents[2]
CLI = Path(os.environ.get("MOXIE_CLI", ROOT / "build/cpu/bin/moxie"))

pytestmark = pytest.mark.skipif(not CLI.exists(), reason=f"no command at {CLI}; make build makes it")

RUNS = {
    "bf16": "--tokens 20,0,7 --ranks 3 --experts 7 --shared-intermediate 64 --shared-output-gate",
    "f32, biases": "--tokens 9,33 --ranks 2 --dtype f32 --bias --activation gpt_oss --ids i64 --shared-intermediate 0",
    "bf16 gradients": "--tokens 12,5 --ranks 2 --grads bf16 --shared-intermediate 0",
}


def load(folder, name):
    path = folder / f"{name}.npy"
    if not path.exists():
        path = folder / f"{name}.bf16.npy"
    return np.load(path) if path.exists() else None


def read_problem(folder):
    data = json.loads((folder / "problem.json").read_text())
    p = data["problem"]
    activation = p.pop("activation")
    problem = moxie.Problem(
        **{
            **p,
            "dtype": moxie.DType[p["dtype"]],
            "activation": moxie.Activation(**{**activation, "kind": moxie.ActivationKind[activation["kind"]]}),
            "shared": moxie.SharedExpert(**p["shared"]),
        }
    )
    return problem, data["tokens"]


@pytest.mark.parametrize("name", RUNS)
def test_same_bits_as_the_command(name, seed, tmp_path):
    shape = "--hidden 128 --intermediate 64 --experts 6 --top-k 3".split()
    options = RUNS[name].split()
    if "--experts" in options:
        shape = shape[:4] + shape[6:]
    dump = tmp_path / "dump"
    subprocess.run(
        [CLI, "run", *shape, *options, "--repeat", "1", "--seed", str(seed), "--dump", dump],
        check=True,
        capture_output=True,
        text=True,
    )
    problem, tokens = read_problem(dump)
    folders = [dump / f"rank{r}" for r in range(problem.num_ranks)]
    weights = [moxie.Weights(**{n: load(f, n) for n in WEIGHT_NAMES}) for f in folders]
    x, ids, route_weights, dy = ([load(f, n) for f in folders] for n in ("x", "expert_ids", "route_weights", "dy"))
    assert [len(v) for v in x] == tokens
    with moxie.World.cpu(num_ranks=problem.num_ranks) as world:
        layer = moxie.Layer(world, problem)
        y, context = layer.forward(x=x, expert_ids=ids, route_weights=route_weights, weights=weights)
        grads_dtype = moxie.DType.bf16 if "bf16 gradients" in name else None
        grads = layer.backward(context, x=x, dy=dy, weights=weights, grads_dtype=grads_dtype)
    for rank, folder in enumerate(folders):
        assert same_bits(y[rank], load(folder, "y"))
        assert same_bits(grads[rank].dx, load(folder, "dx"))
        assert same_bits(grads[rank].d_route_weights, load(folder, "d_route_weights"))
        wanted = moxie.Weights(**{n: load(folder, f"d_{n}") for n in WEIGHT_NAMES})

        def check(part, got, want, rank=rank):
            assert same_bits(got, want), f"d_{part} of rank {rank}"

        compare_weights(check, grads[rank].weights, wanted)
