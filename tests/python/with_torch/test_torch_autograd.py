"""What training loops do around a layer: numerical gradients, activation checkpoints, several microbatches and layers
at a time, deterministic mode, threads."""

import threading

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import moxie.torch as mt  # noqa: E402
import plain  # noqa: E402
from plain import make_inputs, make_module, make_problem  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import moxie  # noqa: E402


def make(place, generator, *, routed=True, **options):
    problem = make_problem(place.dtypes[-1], **options)
    router = mt.TopKRouter(64, 5, problem.top_k, device=place.device) if routed else None
    return make_module(place, problem, generator, router=router)


def random_x(place, generator, *shape):
    return torch.randn(*shape, 64, generator=generator).to(place.device, plain.DTYPES[place.dtypes[-1]])


def all_grads(module, *more):
    return [p.grad for p in module.parameters()] + [t.grad for t in more]


def same(a, b):
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_gradients_are_slopes(generator):
    """Central differences along each gradient, in float32, through router and layer. K = E: no step reroutes."""
    place = plain.Place("cpu")
    problem = make_problem(top_k=5, num_ranks=2, shared=moxie.SharedExpert(intermediate=64, output_gate=True))
    module = make_module(place, problem, generator, router=mt.TopKRouter(64, 5, 5), gate_up="fused", experts="list")
    x = torch.randn(24, 64, generator=generator, requires_grad=True)
    dy = torch.randn(24, 64, generator=generator)

    def loss():
        return (module(x).double() * dy).sum()

    loss().backward()
    for name, p in [*module.named_parameters(), ("x", x)]:
        length = p.grad.norm()
        assert length > 0, name
        step = 1e-3 * p.detach().norm().clamp(min=1)
        with torch.no_grad():
            direction = p.grad / length
            p += step * direction
            after = loss()
            p -= 2 * step * direction
            before = loss()
            p += step * direction
        slope = (after - before) / (2 * step)
        assert slope.item() == pytest.approx(length.item(), rel=0.03), name
    place.close()


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint_gives_the_same_bits(place, generator, use_reentrant):
    module = make(place, generator, num_ranks=2)
    x = random_x(place, generator, 30).requires_grad_()
    y = module(x)
    y.float().square().sum().backward()
    want = [y, *all_grads(module, x)]
    module.zero_grad()
    x.grad = None
    y = checkpoint(module, x, use_reentrant=use_reentrant)
    assert not module.layer._in_flight, "a checkpointed forward pass keeps nothing"
    y.float().square().sum().backward()
    place.synchronize()
    assert same(want, [y, *all_grads(module, x)])


def test_two_microbatches_in_flight(place, generator):
    module = make(place, generator)
    xs = [random_x(place, generator, t).requires_grad_() for t in (30, 0, 17)]
    want = []
    for x in xs:
        y = module(x)
        y.float().square().sum().backward()
        want.append((y.detach(), x.grad))
        x.grad = None
    one_by_one = all_grads(module)
    module.zero_grad()
    ys = [module(x) for x in xs]
    assert len(module.layer._in_flight) == 3
    for y in ys:  # in order: sums of gradients are those of before
        y.float().square().sum().backward(retain_graph=True)
    for x, y, (y_alone, dx_alone) in zip(xs, ys, want, strict=True):
        assert torch.equal(y, y_alone) and torch.equal(x.grad, dx_alone)
    assert same(one_by_one, all_grads(module))
    assert len(module.layer._in_flight) == 3, "retain_graph keeps what backward needs"
    for y in reversed(ys):
        y.float().square().sum().backward()
    del ys, y
    place.synchronize()
    assert not module.layer._in_flight and module.layer.num_contexts == 3


def test_contexts_return_when_a_graph_is_dropped(place, generator):
    module = make(place, generator)
    x = random_x(place, generator, 12)
    for _ in range(4):
        y = module(x)
        assert len(module.layer._in_flight) == 1
        del y
    assert not module.layer._in_flight and module.layer.num_contexts == 1
    place.synchronize()


def test_layers_of_one_world_share_a_workspace(place, generator):
    """Three modules of one problem, one of another, behind each other."""
    world = place.world(2)
    problem = make_problem(place.dtypes[-1], num_ranks=2)
    larger = make_problem(place.dtypes[-1], num_ranks=2, intermediate=192, max_tokens=50)
    modules = torch.nn.Sequential(*(mt.MoE(p, world) for p in (problem, larger, problem, problem)))
    for m in modules:
        m.router = mt.TopKRouter(64, 5, 2, device=place.device)
        plain.fill(m, generator)
    assert modules[0].layer is modules[2].layer is modules[3].layer is not modules[1].layer
    x = random_x(place, generator, 30).requires_grad_()
    modules(x).float().square().sum().backward()
    assert modules[0].layer.num_contexts == 3 and modules[1].layer.num_contexts == 1
    got = all_grads(modules, x)
    # The same with a world of its own for each.
    apart = torch.nn.Sequential(*(mt.MoE(m.layer.problem, place.world(2)) for m in modules))
    for a, m in zip(apart, modules, strict=True):
        a.router = mt.TopKRouter(64, 5, 2, device=place.device)
        a.load_state_dict(m.state_dict())
    x.grad = None
    apart(x).float().square().sum().backward()
    place.synchronize()
    assert same(got, all_grads(apart, x))


def test_deterministic_algorithms_with_filled_memory(place, generator):
    module = make(place, generator, num_ranks=2)
    x = random_x(place, generator, 30).requires_grad_()

    def run():
        module.zero_grad()
        x.grad = None
        y = module(x)
        y.float().square().sum().backward()
        return [y, *all_grads(module, x)]

    want = run()
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.utils.deterministic.fill_uninitialized_memory
        got = run()
    finally:
        torch.use_deterministic_algorithms(False)
    place.synchronize()
    assert same(want, got) and all(t.isfinite().all() for t in got)


def test_an_offloaded_token_is_an_error_not_a_wrong_gradient(generator):
    place = plain.Place("cpu")
    module = make(place, generator)
    x = random_x(place, generator, 12).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        y = module(x)
    module(x)
    with pytest.raises(moxie.InvalidArgumentError, match="the context of this backward pass is gone"):
        y.sum().backward()
    place.close()


def test_weights_changed_before_backward_are_refused(generator):
    place = plain.Place("cpu")
    module = make(place, generator)
    y = module(random_x(place, generator, 12))
    with torch.no_grad():
        module.gate.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    place.close()


def test_second_derivatives_are_refused(generator):
    place = plain.Place("cpu")
    module = make(place, generator, routed=False)
    x, ids, route_weights, _ = make_inputs(module.layer.problem, 12, generator)
    x.requires_grad_()
    (dx,) = torch.autograd.grad(module(x, ids, route_weights).square().sum(), x, create_graph=True)
    with pytest.raises(moxie.InvalidArgumentError, match="gradient of a gradient"):
        dx.sum().backward()
    place.close()


def test_passes_of_two_threads_take_turns(generator):
    place = plain.Place("cpu")
    module = make(place, generator)
    xs = [random_x(place, generator, 30) for _ in range(2)]
    want = [module(x).detach() for x in xs]
    failed = []

    def loop(i):
        for _ in range(20):
            y = module(xs[i])
            y.sum().backward()
            if not torch.equal(y, want[i]):
                failed.append(i)

    threads = [threading.Thread(target=loop, args=(i,)) for i in range(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failed
    place.close()


def test_training_lowers_the_loss(place, generator):
    """Moxie's MoE and plain torch, the same start, the same steps: the same losses."""
    dtype = place.dtypes[0]  # float32 where there is; BF16 weights are rounded at each step
    problem = make_problem(dtype, max_tokens=64)
    module = make_module(place, problem, generator, router=mt.TopKRouter(64, 5, 2, device=place.device))
    w = {n: t.double().cpu().requires_grad_() for n, t in module.stacked_weights().items()}
    x = torch.randn(64, 64, generator=generator).to(place.device, plain.DTYPES[dtype])
    target = torch.randn(64, 64, generator=generator)
    ids, route_weights, _ = module.router(x)
    ids, route_weights = ids, route_weights.detach()
    ours = torch.optim.SGD(module.flat_weights(), lr=20.0)
    theirs = torch.optim.SGD(list(w.values()), lr=20.0)
    losses = []
    for _ in range(8):
        ours.zero_grad()
        loss = (module(x, ids, route_weights).float() - target.to(place.device)).square().mean()
        loss.backward()
        ours.step()
        theirs.zero_grad()
        y = plain.run(problem, x.double().cpu(), ids.cpu(), route_weights.double().cpu(), w)
        other = (y - target.double()).square().mean()
        other.backward()
        theirs.step()
        losses.append((loss.item(), other.item()))
    assert losses[-1][0] < 0.9 * losses[0][0]
    for a, b in losses:
        assert a == pytest.approx(b, rel=1e-4 if dtype == moxie.DType.f32 else 6e-2)
