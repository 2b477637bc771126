"""torch.compile in one graph, fake tensors, and what torch itself tests of an op."""

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import moxie.torch as mt  # noqa: E402
import plain  # noqa: E402
from moxie.torch import weights as parts  # noqa: E402
from plain import make_inputs, make_module, make_problem  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

import moxie  # noqa: E402


def run(function, x, *more):
    x = x.detach().clone().requires_grad_()
    y = function(x, *more)
    y.float().square().sum().backward()
    return y, x.grad


FUSED_LIST = {"gate_up": "fused", "experts": "list"}


@pytest.mark.parametrize(
    ("storage", "backend"),
    [({}, "aot_eager"), (FUSED_LIST, "aot_eager"), ({}, "inductor")],
    ids=["separate", "fused list", "inductor"],
)
def test_fullgraph(place, generator, storage, backend):
    torch._dynamo.reset()
    problem = make_problem(place.dtypes[-1], num_ranks=2, shared=moxie.SharedExpert(intermediate=64))
    module = make_module(place, problem, generator, router=mt.TopKRouter(64, 5, 2, device=place.device), **storage)
    compiled = torch.compile(module, fullgraph=True, backend=backend)
    for tokens in (12, 17, 30):  # a changed number of tokens is a symbol from then on
        x = make_inputs(problem, tokens, generator, place.device)[0]
        y, dx = run(module, x)
        grads = [p.grad for p in module.parameters()]
        module.zero_grad()
        y_compiled, dx_compiled = run(compiled, x)
        got = [y_compiled, dx_compiled, *(p.grad for p in module.parameters())]
        for one, other in zip(got, [y, dx, *grads], strict=True):
            plain.close("compiled", one, other, problem.dtype)
        module.zero_grad()
        with torch.no_grad():
            plain.close("no_grad", compiled(x), y, problem.dtype)
    del y, y_compiled
    place.synchronize()
    assert not module.layer._in_flight and module.layer.num_contexts <= 2


def test_compiled_main_grads_and_checkpoints(place, generator):
    torch._dynamo.reset()
    problem = make_problem(place.dtypes[-1])
    module = make_module(place, problem, generator)
    module.make_main_grads()
    x, ids, route_weights, _ = make_inputs(problem, 12, generator, place.device)
    run(module, x, ids, route_weights)
    want = [p.main_grad.clone() for p in module.flat_weights()]
    module.zero_main_grads()

    def block(x, ids, route_weights):
        return torch.utils.checkpoint.checkpoint(module, x, ids, route_weights, use_reentrant=False)

    for function in (module, block):
        compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
        run(compiled, x, ids, route_weights)
        place.synchronize()
        for p, main_grad in zip(module.flat_weights(), want, strict=True):
            assert p.grad is None
            torch.testing.assert_close(p.main_grad, main_grad, rtol=1e-5, atol=1e-6)
        module.zero_main_grads()


def test_compiled_main_grads_when_nothing_else_needs_gradients(place, generator):
    """The backward pass has no result that anybody reads, and must run all the same."""
    torch._dynamo.reset()
    problem = make_problem(place.dtypes[-1])
    module = make_module(place, problem, generator)
    module.make_main_grads()
    x, ids, route_weights, dy = make_inputs(problem, 12, generator, place.device)
    torch.compile(module, fullgraph=True, backend="aot_eager")(x, ids, route_weights).backward(dy)
    place.synchronize()
    assert all(p.main_grad.any() for p in module.flat_weights())


def test_two_layers_in_one_graph(place, generator):
    torch._dynamo.reset()
    problem = make_problem(place.dtypes[-1])
    world = place.world()
    model = torch.nn.Sequential(*(mt.MoE(problem, world) for _ in range(2)))
    for m in model:
        m.router = mt.TopKRouter(64, 5, 2, device=place.device)
        plain.fill(m, generator)
    x = make_inputs(problem, 12, generator, place.device)[0]
    y, dx = run(model, x)
    y_compiled, dx_compiled = run(torch.compile(model, fullgraph=True, backend="aot_eager"), x)
    place.synchronize()
    plain.close("y", y_compiled, y, problem.dtype)
    plain.close("dx", dx_compiled, dx, problem.dtype)


def test_fake_tensors(place, generator):
    """Shapes without a pass: the weights stay real, the inputs are fake."""
    problem = make_problem(place.dtypes[-1], num_ranks=2, expert_bias=True)
    module = make_module(place, problem, generator)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        x, ids, route_weights, _ = (mode.from_tensor(t) for t in make_inputs(problem, 11, generator, place.device))
        x.requires_grad_()
        y = module(x, ids, route_weights)
        assert y.shape == (11, 64) and y.dtype == x.dtype and y.device == x.device
        y.sum().backward()
        assert x.grad.shape == x.shape and module.gate_bias.grad.shape == module.gate_bias.shape
        with pytest.raises(moxie.InvalidArgumentError, match=r"expert_ids is \[11, 1\]"):
            module(x, ids[:, :1], route_weights)
    module.zero_grad()
    assert module.layer.num_contexts == 0


@pytest.mark.parametrize("layout", [0, parts.FUSED])
def test_opcheck(place, generator, layout):
    problem = make_problem(place.dtypes[-1])
    module = make_module(place, problem, generator, gate_up="fused" if layout else "separate")
    x, ids, route_weights, _ = make_inputs(problem, 12, generator, place.device)
    route_weights[ids < 0] = 0
    rest = (module.layer.handle, layout)
    tests = ("test_schema", "test_faketensor", "test_autograd_registration")
    frozen = (x, ids, route_weights, [w.detach() for w in module.flat_weights()], *rest)
    torch.library.opcheck(torch.ops.moxie.infer.default, frozen, test_utils=tests)
    # The token differs from call to call: under AOT dispatch the layer is compared, above, and not the op with itself.
    learning = (x.requires_grad_(), ids, route_weights.requires_grad_(), module.flat_weights(), *rest)
    torch.library.opcheck(torch.ops.moxie.forward.default, learning, test_utils=tests)
