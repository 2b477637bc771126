"""docs/from-your-moe-layer.md: its Python blocks run one after another, its layer gives what it had before, its memory
table is the library's, and its errors are sentences of the package."""

import re
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import moxie.torch  # noqa: E402
from torch.nn import functional as F  # noqa: E402

import moxie  # noqa: E402

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs/from-your-moe-layer.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE, re.M | re.S)


def test_blocks(generator, monkeypatch, capsys):
    monkeypatch.setattr(moxie.torch, "local_world", lambda: world)
    names = {"moxie": moxie, "torch": torch, "F": F}
    exec(BLOCKS[0], names)
    before = names["before"] = names["Before"]()
    before.top_k = 2
    before.router = torch.nn.Linear(256, 8, bias=False)
    for name, shape in (("gate", (8, 128, 256)), ("up", (8, 128, 256)), ("down", (8, 256, 128))):
        value = torch.randn(shape, generator=generator) * shape[-1] ** -0.5
        before.register_parameter(name, torch.nn.Parameter(value))
    before = before.bfloat16()
    x = names["x"] = torch.randn(30, 256, generator=generator).bfloat16()
    with moxie.World.cpu(num_ranks=1) as world:
        exec(BLOCKS[1], names)
        chosen = names["router"](x).expert_ids.sort().values
        before.router.float()
        plain_x, before.router.forward = x, lambda x: F.linear(x.float(), before.router.weight)
        want = before(plain_x).double()
        assert (before.router(x).topk(2).indices.sort().values == chosen).all()
        assert (names["y"].double() - want).norm() < 2e-2 * want.norm()
        for block in BLOCKS[2:]:
            exec(block, names)
    assert "workspace" in capsys.readouterr().out or len(BLOCKS) < 3


def memory(problem, plan):
    """heap, workspace, context in MiB."""
    with moxie.World.cpu(num_ranks=1) as world:
        layer = moxie.Layer(world, problem, plan)
        buffers, context = layer.memory(), layer.make_context().num_bytes
    heap = sum(v for name, v in buffers.items() if name.startswith("heap."))
    return [f"{v / 2**20:.1f}" for v in (heap, buffers["total"] - heap, context)]


def test_memory_table():
    rows = re.findall(r"^\| ([a-z0-9-]+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", PAGE, re.M)
    assert len(rows) == 4
    names = {"moxie": moxie}
    exec(BLOCKS[2].split("layer =")[0], names)
    for name, *cells in rows:
        problem = moxie.find_preset(name).problem(num_ranks=1, max_tokens=2048)
        heap, workspace, context = memory(problem, moxie.default_plan(problem))
        _, small_workspace, small_context = memory(problem, names["small"])
        assert cells == [heap, workspace, context, small_workspace, small_context], name


def test_errors_are_those_of_the_package():
    """Each sentence's words stand in the sources, numbers and names apart."""
    table = PAGE.split("## Errors")[1].split("## What it is not")[0]
    rows = re.findall(r"^\| `([^`]+)` \| `(\w+)` \|", table, re.M)
    assert len(rows) > 15
    kinds = (".py", ".cpp", ".cu", ".h")
    files = [p for folder in ("python", "moxie") for p in sorted((ROOT / folder).rglob("*")) if p.suffix in kinds]
    sources = re.sub(r'"\s*\n\s*f?"', "", "".join(p.read_text() for p in files))
    apart = re.compile(r"[\[\]\d.,]+|torch\S+|\b(?:x|weights|cpu|cuda|Layer|gate|down|forward)\b")
    for sentence, name in rows:
        assert issubclass(getattr(moxie, name), moxie.Error)
        words = apart.split(sentence)
        longest = max((w.strip() for w in words), key=len)
        assert len(longest) > 6 and longest in sources, f"{sentence}: {longest}"
