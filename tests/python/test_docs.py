"""The Python blocks of docs/python.md run as printed."""

import re
from pathlib import Path

import numpy as np
import pytest
from cases import make_case, make_problem
from test_checkpoint import make_tensors, write

import moxie

PAGE = Path(__file__).resolve().parents[2] / "docs/python.md"
BLOCKS = re.findall(r"^## ([^\n]*)\n(?:(?!^## ).)*?^```python\n(.*?)^```", PAGE.read_text(), re.M | re.S)


@pytest.mark.parametrize(("section", "block"), BLOCKS, ids=[section for section, _ in BLOCKS])
def test_block(section, block, rng, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "path/to").mkdir(parents=True)
    write(tmp_path / "path/to/model", make_tensors("qwen3_moe", rng, np.float32), num_shards=2)
    case = make_case(make_problem(ranks=2), rng, tokens=(9, 4))
    num_ranks = 4 if section == "Checkpoints" else 2
    with moxie.World.cpu(num_ranks=num_ranks) as world:
        names = {"moxie": moxie, "world": world, "problem": case.problem, "plan": moxie.Plan(), "dy": case.dy}
        arguments = case.inputs
        if section == "Ranks as processes":  # of one rank, to run here
            names |= {"rank": 0, "num_ranks": 1, "problem": make_problem(ranks=1, experts=3)}
            arguments = {name: values[0] for name, values in case.inputs.items()}
            arguments["expert_ids"] = arguments["expert_ids"] % 3
        if section == "Planner and timelines":
            names["layer"] = moxie.Layer(world, case.problem)
        exec(compile(block, str(PAGE), "exec"), {**names, **arguments})


def test_there_are_blocks():
    assert [section for section, _ in BLOCKS] == [
        "A pass",
        "Ranks as processes",
        "Planner and timelines",
        "Checkpoints",
    ]
