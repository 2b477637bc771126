"""MoE and moe against plain torch in FP64: every storage, shapes and routings that break such layers, main
gradients."""

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import moxie.torch as mt  # noqa: E402
import plain  # noqa: E402
from plain import make_inputs, make_module, make_problem  # noqa: E402

import moxie  # noqa: E402

CLAMP = 1 + 1 / 256  # no BF16 number, and on no grid of plain.make_inputs
SCENES = {
    "one rank": ({}, 13, "random"),
    "full": ({"max_tokens": 37}, 37, "random"),
    "one token": ({}, 1, "random"),
    "no tokens": ({"shared": moxie.SharedExpert(intermediate=64)}, 0, "random"),
    "two ranks": ({"num_ranks": 2}, 21, "random"),
    "more ranks than experts": ({"num_ranks": 6}, 21, "random"),
    "holes": ({"num_ranks": 3}, 29, "holes"),
    "one expert": ({"num_ranks": 2}, 29, "one"),
    "K = 1": ({"top_k": 1}, 9, "random"),
    "K = E": ({"top_k": 5}, 9, "random"),
    "shared expert": ({"num_ranks": 2, "shared": moxie.SharedExpert(intermediate=64)}, 21, "random"),
    "output gate": ({"shared": moxie.SharedExpert(intermediate=128, output_gate=True)}, 21, "holes"),
    "gpt-oss": (
        {
            "num_ranks": 2,
            "expert_bias": True,
            "activation": moxie.Activation(kind=moxie.ActivationKind.gpt_oss, limit=CLAMP),
        },
        21,
        "random",
    ),
}
STORAGES = {
    "separate": {},
    "fused": {"gate_up": "fused"},
    "list": {"experts": "list"},
    "fused list": {"gate_up": "fused", "experts": "list"},
}


def backward(module, x, ids, route_weights, dy):
    x.requires_grad_()
    route_weights.requires_grad_()
    y = module(x, ids, route_weights)
    y.backward(dy)
    return y


@pytest.mark.parametrize("scene", SCENES)
def test_against_plain_torch(place, scene, generator):
    options, tokens, routing = SCENES[scene]
    for dtype in place.dtypes:
        problem = make_problem(dtype, **options)
        module = make_module(place, problem, generator)
        x, ids, route_weights, dy = make_inputs(problem, tokens, generator, place.device, routing)
        y = backward(module, x, ids, route_weights, dy)
        place.synchronize()
        plain.judge(module, x, ids, route_weights, dy, y)
        assert not route_weights.grad[ids < 0].any()


@pytest.mark.parametrize("storage", STORAGES)
def test_storages(place, storage, generator):
    for dtype in place.dtypes:
        problem = make_problem(
            dtype, num_ranks=2, expert_bias=True, shared=moxie.SharedExpert(intermediate=64, output_gate=True)
        )
        module = make_module(place, problem, generator, **STORAGES[storage])
        x, ids, route_weights, dy = make_inputs(problem, 30, generator, place.device)
        y = backward(module, x, ids, route_weights, dy)
        place.synchronize()
        plain.judge(module, x, ids, route_weights, dy, y)


@pytest.mark.parametrize("target", STORAGES)
@pytest.mark.parametrize("source", STORAGES)
def test_state_dicts_load_into_each_other(source, target, generator):
    problem = make_problem(shared=moxie.SharedExpert(intermediate=64))
    place = plain.Place("cpu")
    world = place.world()
    first = mt.MoE(problem, world, router=mt.TopKRouter(64, 5, 2), **STORAGES[source])
    second = mt.MoE(problem, world, router=mt.TopKRouter(64, 5, 2), **STORAGES[target])
    assert first.layer is second.layer
    second.load_state_dict(first.state_dict())
    for name, t in first.stacked_weights().items():
        assert torch.equal(t, second.stacked_weights()[name]), name
    x = torch.randn(7, 64, generator=generator)
    assert torch.equal(first(x), second(x))
    state = first.state_dict()
    del state["down.0" if "down.0" in state else "down"]
    with pytest.raises((RuntimeError, KeyError)):
        second.load_state_dict(state)
    place.close()


@pytest.mark.parametrize("storage", STORAGES)
def test_main_grads(place, storage, generator):
    """Two backward passes add up in float32; .grad stays None."""
    problem = make_problem(place.dtypes[-1], num_ranks=2, shared=moxie.SharedExpert(intermediate=64, output_gate=True))
    module = make_module(place, problem, generator, **STORAGES[storage])
    module.make_main_grads()
    sums = {name: 0 for name in module.stacked_weights()}
    for _ in range(2):
        x, ids, route_weights, dy = make_inputs(problem, 33, generator, place.device)
        backward(module, x, ids, route_weights, dy)
        for name, grad in plain.reference(problem, x, ids, route_weights, module.stacked_weights(), dy)[1].items():
            if name in sums:
                sums[name] = sums[name] + grad
    place.synchronize()
    for p in module.flat_weights():
        assert p.grad is None and p.main_grad.dtype == torch.float32
        p.grad = p.main_grad.to(p.dtype)
    for name, grad in plain.grads_of(module).items():
        plain.close(name, grad, sums[name], problem.dtype)
    module.zero_main_grads()
    assert not any(p.main_grad.any() for p in module.flat_weights())


def test_main_grads_of_your_own(place, generator):
    """Experts whose main gradients are separate tensors."""
    problem = make_problem(place.dtypes[-1])
    module = make_module(place, problem, generator, experts="list")
    twin = make_module(place, problem, generator, experts="list")
    twin.load_state_dict(module.state_dict())
    for p in module.flat_weights():
        p.main_grad = torch.ones(p.shape, dtype=torch.float32, device=p.device)
    buffer = torch.ones(2, *module.down[0].shape, device=place.device)  # neighbours by address, of different storages
    for p, one in zip(module.down[:2], buffer, strict=True):
        p.main_grad = torch.from_dlpack(one)
    twin.make_main_grads()
    x, ids, route_weights, dy = make_inputs(problem, 33, generator, place.device)
    for m in (module, twin):
        backward(m, x.detach().clone(), ids, route_weights.detach().clone(), dy)
    place.synchronize()
    for p, q in zip(module.flat_weights(), twin.flat_weights(), strict=True):
        torch.testing.assert_close(p.main_grad, q.main_grad + 1, rtol=1e-6, atol=1e-6)


def test_bf16_gradients_are_rounded_once(place, generator):
    problem = make_problem(moxie.DType.bf16)
    module = make_module(place, problem, generator)
    x, ids, route_weights, dy = make_inputs(problem, 33, generator, place.device)
    backward(module, x, ids, route_weights, dy)
    narrow = [p.grad for p in module.flat_weights()]
    module.make_main_grads()
    backward(module, x.detach().clone(), ids, route_weights.detach().clone(), dy)
    place.synchronize()
    assert all(torch.equal(p.main_grad.bfloat16(), g) for p, g in zip(module.flat_weights(), narrow, strict=True))


def test_the_function_equals_the_module(place, generator):
    problem = make_problem(place.dtypes[-1], num_ranks=2)
    module = make_module(place, problem, generator)
    x, ids, route_weights, _ = make_inputs(problem, 21, generator, place.device)
    weights = mt.ExpertWeights(**{n: t.clone().requires_grad_() for n, t in module.stacked_weights().items()})
    y = mt.moe(x, ids.int(), route_weights, weights, layer=module.layer)
    y.float().sum().backward()
    place.synchronize()
    assert torch.equal(y, module(x, ids, route_weights)) and weights.gate.grad.shape == weights.gate.shape
    fused = mt.ExpertWeights(gate_up=torch.stack([weights.gate, weights.up]).detach(), down=weights.down.detach())
    assert torch.equal(y, mt.moe(x, ids, route_weights, fused, layer=module.layer))


def test_frozen_weights_and_inputs(place, generator):
    problem = make_problem(place.dtypes[-1])
    module = make_module(place, problem, generator)
    x, ids, route_weights, dy = make_inputs(problem, 21, generator, place.device)
    module.up.requires_grad_(False)
    module(x, ids, route_weights).backward(dy)
    assert module.up.grad is None and module.gate.grad is not None and x.grad is None
    module.requires_grad_(False)
    x.requires_grad_()
    module(x, ids, route_weights).backward(dy)
    place.synchronize()
    assert x.grad is not None


def test_infer_has_the_bits_of_forward_and_keeps_nothing(place, generator):
    problem = make_problem(place.dtypes[-1], num_ranks=2)
    module = make_module(place, problem, generator)
    x, ids, route_weights, _ = make_inputs(problem, 21, generator, place.device)
    y = module(x, ids, route_weights)
    assert module.layer.num_contexts == 1
    with torch.no_grad():
        assert torch.equal(module(x, ids, route_weights), y) and not module(x, ids, route_weights).requires_grad
    with torch.inference_mode():
        assert torch.equal(module(x, ids, route_weights), y)
    assert module.layer.num_contexts == 1


def test_leading_dimensions_and_the_included_router(place, generator):
    problem = make_problem(place.dtypes[-1])
    router = mt.TopKRouter(64, 5, 2, device=place.device)
    module = make_module(place, problem, generator, router=router)
    x = make_inputs(problem, 24, generator, place.device)[0].view(2, 3, 4, 64).requires_grad_()
    y = module(x)
    assert y.shape == x.shape
    y.float().square().mean().backward()
    place.synchronize()
    routing = router(x)
    assert torch.equal(y.view(24, 64), module(x.view(24, 64), routing.expert_ids, routing.route_weights))
    want = x.detach().double().cpu().requires_grad_()
    weight = router.weight.detach().double().cpu().requires_grad_()
    scores = (want.view(24, 64) @ weight.T).softmax(-1)
    chosen = scores.gather(1, routing.expert_ids.cpu())
    chosen = chosen / chosen.sum(-1, keepdim=True)
    w = {n: t.double().cpu() for n, t in module.stacked_weights().items()}
    plain.run(problem, want.view(24, 64), routing.expert_ids.cpu(), chosen, w).square().mean().backward()
    plain.close("router", router.weight.grad, weight.grad, problem.dtype)
    plain.close("x", x.grad, want.grad, problem.dtype)


def test_initial_weights_do_not_depend_on_the_ranks():
    place, found = plain.Place("cpu"), []
    for ranks in (1, 3):
        torch.manual_seed(5)
        module = mt.MoE(make_problem(num_ranks=ranks), place.world(ranks), gate_up="fused")
        found.append(module.stacked_weights())
    assert all(torch.equal(found[0][n], found[1][n]) for n in found[0])
    assert not torch.equal(found[0]["gate"][0], found[0]["gate"][1]) and not torch.equal(*found[0]["up"][:2])
    assert found[0]["gate"].abs().max() <= 64**-0.5 and found[0]["gate"].std() > 0.5 * 64**-0.5
    place.close()


def test_layouts_of_others_are_reversible(generator):
    gate_up = torch.randn(2, 3, 4, 5, generator=generator)
    halves = mt.to_halves(gate_up)
    assert halves.shape == (3, 8, 5) and torch.equal(halves[:, :4], gate_up[0])
    assert torch.equal(mt.from_halves(halves), gate_up)
    mixed = mt.to_interleaved(gate_up)
    assert mixed.shape == (3, 5, 8) and torch.equal(mixed[:, :, 0::2], gate_up[0].transpose(1, 2))
    assert torch.equal(mt.from_interleaved(mixed), gate_up)


def test_packing_after_replacement(generator):
    import copy

    place = plain.Place("cpu")
    module = make_module(place, make_problem(), generator, experts="list")
    x, ids, route_weights, _ = make_inputs(module.layer.problem, 9, generator)
    y = module(x, ids, route_weights)
    module.down[2].data = module.down[2].data.clone()
    with pytest.raises(moxie.InvalidArgumentError, match=r"weights.down\[2\] does not follow .*pack\(\)"):
        module(x, ids, route_weights)
    module.pack()
    assert torch.equal(module(x, ids, route_weights), y)
    other = copy.deepcopy(module)
    assert other.layer is module.layer
    other.pack()
    assert torch.equal(other(x, ids, route_weights), y)
    assert torch.equal(module.to(torch.float32)(x, ids, route_weights), y)
    place.close()


def test_input_buffer_needs_no_copy(place, generator):
    problem = make_problem(place.dtypes[-1])
    module = make_module(place, problem, generator).requires_grad_(False)
    x, ids, route_weights, _ = make_inputs(problem, 21, generator, place.device)
    y = module(x, ids, route_weights)
    buffer = module.input_buffer(21)
    assert buffer.shape == x.shape and buffer.dtype == x.dtype and buffer.device == x.device
    buffer.copy_(x)
    assert torch.equal(module(buffer, ids, route_weights), y)
    buffer += 1
    assert not torch.equal(module(buffer, ids, route_weights), y)
    place.synchronize()


def test_memory_counts_what_there_is(generator):
    place = plain.Place("cpu")
    module = make_module(place, make_problem(moxie.DType.bf16), generator)
    memory = module.memory()
    assert memory["weights"] == 3 * 5 * 64 * 128 * 2 and memory["heap.x_in"] > 0
    x, ids, route_weights, _ = make_inputs(module.layer.problem, 9, generator)
    module(x, ids, route_weights)
    assert module.memory()["contexts"] > 0
    memory = module.memory()
    more = memory["contexts"] + memory["weights"]
    assert memory["total"] - more == module.layer.layer.memory()["total"]
    assert sum(memory.values()) > 2 * memory["total"], "forward and backward share addresses"
    place.close()
