"""What only a GPU has: graphs, streams, a host that must not wait. Skipped without one."""

from concurrent.futures import ThreadPoolExecutor

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import moxie.torch as mt  # noqa: E402
import plain  # noqa: E402
from plain import make_inputs, make_module, make_problem  # noqa: E402

import moxie  # noqa: E402

pytestmark = pytest.mark.skipif(bool(plain.no_gpu()), reason=plain.no_gpu() or "a GPU")
BF16 = moxie.DType.bf16


@pytest.fixture
def gpu():
    place = plain.Place("cuda")
    yield place
    place.close()


def step(module, x):
    y = module(x)
    y.float().square().sum().backward()
    return y


def make(gpu, generator, **options):
    problem = make_problem(BF16, **options)
    return make_module(gpu, problem, generator, router=mt.TopKRouter(64, 5, problem.top_k, device="cuda"))


def random_x(generator, tokens):
    return torch.randn(tokens, 64, generator=generator).bfloat16().cuda().requires_grad_()


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_graph_of_forward_and_backward_replays_with_new_inputs(gpu, generator, ranks):
    module = make(gpu, generator, num_ranks=ranks)
    x = random_x(generator, 30)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # warm-up, as torch asks for
        for _ in range(2):
            module.zero_grad()
            x.grad = None
            step(module, x)
    torch.cuda.current_stream().wait_stream(side)
    module.zero_grad()
    x.grad = None
    graph = torch.cuda.CUDAGraph()
    before = module.layer.num_contexts
    with torch.cuda.graph(graph):
        y = step(module, x)
    assert module.layer.num_contexts == before
    static = [y, x.grad, *(p.grad for p in module.parameters())]
    for tokens in (30, 30, 30):
        fresh = random_x(generator, tokens)
        with torch.no_grad():
            x.copy_(fresh)
        for p in module.parameters():
            p.grad.zero_()
        x.grad.zero_()
        graph.replay()
        got = [t.detach().clone() for t in static]
        # Eager passes between replays, in a context of their own.
        grads = [p.grad for p in module.parameters()]
        for p in module.parameters():
            p.grad = None
        y_eager = step(module, fresh)
        want = [y_eager, fresh.grad, *(p.grad for p in module.parameters())]
        for p, grad in zip(module.parameters(), grads, strict=True):
            p.grad = grad
        gpu.synchronize()
        for one, other in zip(got, want, strict=True):
            plain.close("replay", one, other, BF16)


def test_two_microbatches_in_one_graph(gpu, generator):
    module = make(gpu, generator)
    module.make_main_grads()
    xs = [random_x(generator, t) for t in (30, 17)]
    step(module, xs[0])
    module.reserve_contexts(2)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ys = [module(x) for x in xs]
        for y in ys:
            y.float().square().sum().backward()
    module.zero_main_grads()
    graph.replay()
    gpu.synchronize()
    got = [p.main_grad.clone() for p in module.flat_weights()]
    module.zero_main_grads()
    for x in xs:
        step(module, x.detach().requires_grad_())
    gpu.synchronize()
    for one, p in zip(got, module.flat_weights(), strict=True):
        torch.testing.assert_close(one, p.main_grad, rtol=1e-5, atol=1e-6)


def test_captured_inference_needs_no_context(gpu, generator):
    module = make(gpu, generator)
    x = random_x(generator, 8)
    with torch.no_grad():
        y = module(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = module(x)
    graph.replay()
    gpu.synchronize()
    assert torch.equal(captured, y) and module.layer.num_contexts == 0


def test_no_later_layer_moves_the_heap_of_a_graph(gpu, generator):
    module = make(gpu, generator)
    x = random_x(generator, 8)
    step(module, x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(module, x)
    with pytest.raises(moxie.InvalidArgumentError, match="needs a heap of"):
        mt.MoE(make_problem(BF16, max_tokens=4000), module.layer.world)


def test_the_host_never_waits(gpu, generator):
    module = make(gpu, generator, num_ranks=2, shared=moxie.SharedExpert(intermediate=64))
    xs = [random_x(generator, 30) for _ in range(2)]
    for x in xs:
        step(module, x)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        ys = [module(x) for x in xs]
        for y in ys:
            y.float().square().sum().backward()
        with torch.no_grad():
            module(xs[0])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    gpu.synchronize()


def test_passes_of_threads_that_have_not_called_cuda(gpu, generator):
    """As autograd's has not before the first backward: the driver makes tensor maps only where a context is current."""
    problem = make_problem(BF16, num_ranks=2, shared=moxie.SharedExpert(intermediate=64))
    x, ids, route_weights, dy = make_inputs(problem, 30, generator, "cuda")
    one, other = (make_module(gpu, problem, generator) for _ in range(2))
    other.load_state_dict(one.state_dict())

    def in_place(call, *arguments, **options):
        return call(*arguments, **options)

    def in_new_thread(call, *arguments, **options):
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(call, *arguments, **options).result()

    results = []
    for module, run in ((one, in_place), (other, in_new_thread)):
        layer, flat = module.layer, [w.detach() for w in module.flat_weights()]
        y, token = run(layer.run_forward, x, ids, route_weights, flat, 0, keep=True)
        dx, d_route_weights, grads = run(layer.run_backward, dy, x, token, flat, 0)
        results.append([y, dx, d_route_weights, *grads])
    gpu.synchronize()
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def test_passes_follow_the_current_stream(gpu, generator):
    """The inputs are made late, in side streams; passes of both streams take turns."""
    module = make(gpu, generator)
    xs = [random_x(generator, 30) for _ in range(2)]
    want = []
    for x in xs:
        y = step(module, x)
        want.append((y.detach(), x.grad))
        x.grad = None
    gpu.synchronize()
    torch.cuda.synchronize()
    busy = torch.randn(4096, 4096, device="cuda")
    streams = [torch.cuda.Stream() for _ in range(2)]
    ys, copies = [], []
    for x, stream in zip(xs, streams, strict=True):
        with torch.cuda.stream(stream):
            late = torch.full_like(x, float("nan")).detach()
            for _ in range(20):
                busy @ busy
            late.copy_(x.detach())
            copies.append(late.requires_grad_())
            ys.append(module(late))
    for y, stream in zip(ys, streams, strict=True):
        with torch.cuda.stream(stream):
            y.float().square().sum().backward()
    torch.cuda.synchronize()
    for (y_want, dx_want), y, x in zip(want, ys, copies, strict=True):
        assert torch.equal(y, y_want) and torch.equal(x.grad, dx_want)


def test_errors_of_a_pass_come_from_synchronize(gpu, generator):
    problem = make_problem(BF16)
    module = make_module(gpu, problem, generator)
    x, ids, route_weights, _ = make_inputs(problem, 12, generator, "cuda")
    good = module(x, ids, route_weights).detach()
    ids[3, 1] = 99
    module(x, ids, route_weights)
    with pytest.raises(moxie.InvalidRouteError, match="expert id of rank 0 token 3 slot 1 is 99"):
        module.layer.world.synchronize()
    ids[3, 1] = -1
    route_weights[3, 1] = 0
    y = module(x, ids, route_weights)
    gpu.synchronize()
    assert torch.equal(y[:3], good[:3])


def test_what_a_gpu_world_cannot_take(gpu, generator):
    problem = make_problem(BF16)
    module = make_module(gpu, problem, generator)
    x, ids, route_weights, _ = make_inputs(problem, 12, generator, "cuda")
    with pytest.raises(moxie.InvalidArgumentError, match="x is on cpu, must be on cuda:0"):
        module(x.cpu(), ids, route_weights)
    with pytest.raises(moxie.InvalidArgumentError, match="expert_ids is on cpu, must be on cuda:0"):
        module(x, ids.cpu(), route_weights)
    with pytest.raises(moxie.UnavailableError, match="dtype f32 is not available in a CUDA world"):
        mt.MoE(make_problem(moxie.DType.f32), gpu.world())
    module.cpu()
    with pytest.raises(moxie.InvalidArgumentError, match="weights.gate is on cpu, must be on cuda:0"):
        module(x, ids, route_weights)
    module.cuda()
    module(x, ids, route_weights)
