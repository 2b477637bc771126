"""Timelines: of a pass and of a simulation, written as the command writes them."""

import json
import os
import subprocess
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from cases import make_case, make_problem

import moxie

ROOT = Path(__file__).resolve().parents[2]
CLI = Path(os.environ.get("MOXIE_CLI", ROOT / "build/cpu/bin/moxie"))


@pytest.fixture
def passes(rng):
    case = make_case(make_problem(), rng, tokens=(9, 4))
    forward, backward = moxie.trace.Trace(), moxie.trace.Trace()
    with moxie.World.cpu(num_ranks=2) as world:
        layer = moxie.Layer(world, case.problem)
        _, context = layer.forward(**case.inputs, trace=forward)
        layer.backward(context, **case.backward_inputs, trace=backward)
    return [forward, backward]


def test_events(passes):
    forward, backward = passes
    assert forward.title.startswith("forward, 2 ranks") and forward.num_ranks == 2
    kinds = {e.kind for e in forward.events}
    assert {"stage", "schedule", "dispatch", "FC1", "FC2", "merge"} <= kinds
    assert "wgrad" in {e.kind for e in backward.events}
    assert all(0 <= e.begin_ns <= e.end_ns <= forward.span_ns for e in forward.events)
    assert all((e.waits_for is not None) == (e.kind == "wait") for e in forward.events)
    assert sum(forward.time_by_kind_ns().values()) > 0


def test_files(passes, tmp_path):
    svg, timeline = moxie.trace.write(tmp_path / "t", passes, title="a <title>", subtitle="two passes")
    assert (svg.name, timeline.name) == ("t.svg", "t.json")
    text = svg.read_text()
    assert "a &lt;title&gt;" in text and ElementTree.fromstring(text).tag.endswith("svg")
    data = json.loads(timeline.read_text())
    assert len(data["moxie"]["passes"]) == 2 and data["traceEvents"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["t.json", "t.svg"]
    with pytest.raises(OSError):
        moxie.trace.write(tmp_path / "no such folder" / "t", passes)


@pytest.mark.skipif(not CLI.exists(), reason=f"no command at {CLI}")
def test_the_command_draws_them(passes, tmp_path):
    _, timeline = moxie.trace.write(tmp_path / "t", passes)
    subprocess.run([CLI, "trace", timeline, "--svg", tmp_path / "again.svg"], check=True, capture_output=True)
    assert (tmp_path / "again.svg").read_text().count("<rect") > 10
