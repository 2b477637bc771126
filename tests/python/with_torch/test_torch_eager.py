"""The way past torch's dispatcher: which passes may take it, and what happens in a torch without the names it asks."""

import importlib

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import plain  # noqa: E402
from moxie.torch import eager  # noqa: E402
from plain import make_inputs, make_module, make_problem  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402


class CountOps(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen.append(function._schema.name)
        return function(*args, **(kwargs or {}))


@pytest.fixture
def fresh_eager():
    """Makes the module anew, as a process that imports it now has it; once more when the test is over."""
    yield lambda: importlib.reload(eager)
    importlib.reload(eager)


def passes(generator):
    """y without and with a gradient, and all gradients."""
    place = plain.Place("cpu")
    problem = make_problem(num_ranks=2)
    module = make_module(place, problem, generator.manual_seed(5))
    x, ids, route_weights, dy = make_inputs(problem, 30, generator)
    x.requires_grad_()
    with torch.no_grad():
        results = [module(x, ids, route_weights)]
    results.append(module(x, ids, route_weights))
    results[-1].backward(dy)
    results += [x.grad, *(p.grad for p in module.parameters())]
    place.close()
    return results


def test_only_passes_that_nobody_watches():
    assert eager.is_plain(torch.ones(2))
    assert not eager.is_plain(torch.ones(2), torch.ones(2).as_subclass(type("Mine", (torch.Tensor,), {})))
    with CountOps():
        assert not eager.is_plain(torch.ones(2))
    seen = []
    torch.func.vmap(lambda t: seen.append(eager.is_plain(torch.ones(2))) or t)(torch.ones(2))
    assert seen == [False]


@pytest.mark.parametrize("name", ["_len_torch_dispatch_stack", "_are_functorch_transforms_active"])
def test_a_torch_without_a_private_name_uses_the_ops(generator, monkeypatch, fresh_eager, name):
    want = passes(generator)
    with monkeypatch.context() as torch_without:
        torch_without.delattr(torch._C, name)
        fresh_eager()
    assert not eager.is_plain(torch.ones(2))
    for way in ("infer", "apply"):
        monkeypatch.setattr(eager, way, lambda *_: pytest.fail("a pass went past the dispatcher"))
    assert all(torch.equal(a, b) for a, b in zip(want, passes(generator), strict=True))


def test_the_public_apply_does_the_same(generator, monkeypatch):
    """What stands in where the private one is missing."""
    want = passes(generator)
    assert eager.apply != eager.MoEPass.apply
    monkeypatch.setattr(eager, "apply", eager.MoEPass.apply)
    assert all(torch.equal(a, b) for a, b in zip(want, passes(generator), strict=True))
