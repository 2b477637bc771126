"""Forward and backward against the FP64 reference, for the shapes and routings that break such kernels."""

import numpy as np
import pytest
import reference
from cases import compare_weights, make_case, make_problem, same_bits

import moxie

F32, BF16 = moxie.DType.f32, moxie.DType.bf16
CLAMP = 1 + 1 / 256  # no BF16 number, and on no grid of cases.store

# problem, tokens of each rank, routing
SCENES = {
    "one rank": ({"ranks": 1}, (7,), "random"),
    "two ranks": ({"ranks": 2, "max_tokens": 40, "hidden": 128}, (40, 40), "random"),
    "ragged, experts do not divide": ({"ranks": 3, "experts": 7}, (5, 16, 1), "random"),
    "empty ranks": ({"ranks": 4}, (0, 9, 0, 3), "random"),
    "no tokens at all": ({"ranks": 2}, (0, 0), "random"),
    "fewer experts than ranks": ({"ranks": 4, "experts": 3}, (4, 1, 2, 3), "random"),
    "holes": ({"ranks": 2}, (12, 5), "holes"),
    "duplicates": ({"ranks": 2, "top_k": 3}, (6, 4), "duplicates"),
    "all to one expert": ({"ranks": 3}, (16, 16, 16), "one"),
    "K = 1": ({"ranks": 2, "top_k": 1}, (9, 4), "random"),
    "K = E": ({"ranks": 2, "experts": 5, "top_k": 5}, (8, 3), "random"),
    "shared expert": ({"ranks": 2, "shared": moxie.SharedExpert(intermediate=128)}, (6, 3), "random"),
    "shared expert with gate": (
        {"ranks": 2, "shared": moxie.SharedExpert(intermediate=64, output_gate=True)},
        (6, 0),
        "holes",
    ),
    "gpt-oss": (
        {
            "ranks": 2,
            "expert_bias": True,
            "activation": moxie.Activation(kind=moxie.ActivationKind.gpt_oss, limit=CLAMP),
        },
        (10, 5),
        "random",
    ),
    "clamped": (
        {
            "ranks": 2,
            "activation": moxie.Activation(kind=moxie.ActivationKind.swiglu_clamped, limit=CLAMP),
        },
        (10, 5),
        "random",
    ),
}


def run(case, *, plan=None, **options):
    with moxie.World.cpu(num_ranks=case.problem.num_ranks, timeout_s=60, **options) as world:
        layer = moxie.Layer(world, case.problem, plan)
        y, context = layer.forward(**case.inputs)
        return y, layer.backward(context, **case.backward_inputs)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=["f32", "bf16"])
@pytest.mark.parametrize("scene", SCENES)
def test_against_reference(scene, dtype, rng):
    options, tokens, routing = SCENES[scene]
    problem = make_problem(dtype=dtype, **options)
    case = make_case(problem, rng, tokens=tokens, routing=routing)
    y, grads = run(case, faults=moxie.FaultInjection(poison_workspace=True))
    want_y, want, scales = reference.run(problem, case.x, case.expert_ids, case.route_weights, case.weights, case.dy)
    for rank in range(problem.num_ranks):
        reference.close(f"y of rank {rank}", y[rank], want_y[rank], dtype)
        reference.close(f"dx of rank {rank}", grads[rank].dx, want[rank].dx, dtype)
        reference.close(
            f"d_route_weights of rank {rank}",
            grads[rank].d_route_weights,
            want[rank].d_route_weights,
            dtype,
            scale=scales[rank],
        )
        compare_weights(
            lambda name, g, w, rank=rank: reference.close(f"d_{name} of rank {rank}", g, w, dtype, few=True),
            grads[rank].weights,
            want[rank].weights,
        )
        masked = case.expert_ids[rank] < 0
        assert not np.any(grads[rank].d_route_weights[masked])
        if not problem.shared.intermediate:
            assert not np.any(y[rank][np.all(masked, axis=1)])


def test_results_do_not_depend_on_the_plan(rng):
    problem = make_problem(ranks=3, experts=7, dtype=BF16, max_tokens=300)
    case = make_case(problem, rng, tokens=(300, 11, 150), routing="holes")
    y, grads = run(case)
    small_rings = moxie.Plan(
        order=moxie.TaskOrder.lag, lag_bands=1, band_blocks=1, x_ring_blocks=1, hidden_ring_blocks=2,
        chunk_blocks=1, backward_ring_blocks=2, save=moxie.SavePolicy.none, compute_workers=2,
    )  # fmt: skip
    for plan in (small_rings, moxie.Plan(mode=moxie.ExecMode.split), moxie.Plan(save=moxie.SavePolicy.z_and_x)):
        other_y, other = run(case, plan=plan)
        for rank in range(3):
            assert same_bits(y[rank], other_y[rank])
            assert same_bits(grads[rank].dx, other[rank].dx)
            assert same_bits(grads[rank].weights.gate, other[rank].weights.gate)


def test_int64_ids_give_the_same_bits(rng):
    problem = make_problem()
    case = make_case(problem, rng, tokens=(9, 4))
    y, _ = run(case)
    case.expert_ids = [ids.astype(np.int64) for ids in case.expert_ids]
    other, _ = run(case)
    assert all(same_bits(a, b) for a, b in zip(y, other, strict=True))


def test_infer_gives_the_bits_of_forward(rng):
    case = make_case(make_problem(), rng, tokens=(9, 4))
    with moxie.World.cpu(num_ranks=2) as world:
        layer = moxie.Layer(world, case.problem)
        y, _ = layer.forward(**case.inputs)
        assert all(same_bits(a, b) for a, b in zip(y, layer.infer(**case.inputs), strict=True))


def test_out_is_written_and_returned(rng):
    case = make_case(make_problem(), rng, tokens=(9, 4))
    out = [np.empty_like(x) for x in case.x]
    with moxie.World.cpu(num_ranks=2) as world:
        layer = moxie.Layer(world, case.problem)
        expected, context = layer.forward(**case.inputs)
        y, again = layer.forward(**case.inputs, out=out, context=context)
        assert again is context and y[0] is out[0] and y[1] is out[1]
        assert all(same_bits(a, b) for a, b in zip(y, expected, strict=True))
        into = [moxie.Gradients(dx=np.empty_like(x)) for x in case.x]
        grads = layer.backward(context, **case.backward_inputs, out=into)
        assert grads[0] is into[0] and grads[0].weights.gate.dtype == np.float32


def test_accumulate_adds_to_main_gradients(rng):
    case = make_case(make_problem(experts=5), rng, tokens=(9, 4), routing="one")
    with moxie.World.cpu(num_ranks=2) as world:
        layer = moxie.Layer(world, case.problem)
        _, context = layer.forward(**case.inputs)
        once = layer.backward(context, **case.backward_inputs)
        gate = [g.weights.gate.copy() for g in once]
        again = layer.backward(context, **case.backward_inputs, out=once, accumulate=True)
    for rank in range(2):
        assert again[rank].weights.gate is once[rank].weights.gate
        np.testing.assert_allclose(again[rank].weights.gate, 2 * gate[rank], rtol=1e-5, atol=1e-5)
    assert not np.any(gate[0])  # all rows went to the last expert: exact zeros elsewhere


def test_bf16_gradients_when_asked_for(rng):
    case = make_case(make_problem(dtype=BF16, expert_bias=True), rng, tokens=(9, 4))
    with moxie.World.cpu(num_ranks=2) as world:
        layer = moxie.Layer(world, case.problem)
        _, context = layer.forward(**case.inputs)
        wide = layer.backward(context, **case.backward_inputs)
        narrow = layer.backward(context, **case.backward_inputs, grads_dtype=BF16)
    assert narrow[0].weights.gate.dtype == np.uint16 and narrow[0].weights.gate_bias.dtype == np.float32
    assert same_bits(narrow[1].weights.down, moxie.bf16.to_bits(wide[1].weights.down))


def test_results_have_the_element_type_of_x(rng):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    case = make_case(make_problem(dtype=BF16), rng, tokens=(9, 4))
    bits, _ = run(case)
    assert bits[0].dtype == np.uint16
    for name in moxie.Weights.__slots__:
        for w in case.weights:
            if getattr(w, name) is not None:
                setattr(w, name, getattr(w, name).view(ml_dtypes.bfloat16))
    case.x = [x.view(ml_dtypes.bfloat16) for x in case.x]
    case.dy = [dy.view(ml_dtypes.bfloat16) for dy in case.dy]
    y, grads = run(case)
    assert y[0].dtype == ml_dtypes.bfloat16 and grads[0].dx.dtype == ml_dtypes.bfloat16
    assert all(same_bits(a, b.view(np.uint16)) for a, b in zip(bits, y, strict=True))


def test_input_buffer_needs_no_copy(rng):
    case = make_case(make_problem(), rng, tokens=(9, 4))
    with moxie.World.cpu(num_ranks=2) as world:
        layer = moxie.Layer(world, case.problem)
        expected = layer.infer(**case.inputs)
        buffers = [layer.input_buffer(rank) for rank in range(2)]
        assert buffers[0].shape == (16, 64)
        for buffer, x in zip(buffers, case.x, strict=True):
            buffer[: len(x)] = x
        case.x = [b[: len(x)] for b, x in zip(buffers, case.x, strict=True)]
        assert all(same_bits(a, b) for a, b in zip(layer.infer(**case.inputs), expected, strict=True))


def test_read_only_inputs_are_fine(rng):
    case = make_case(make_problem(), rng, tokens=(9, 4))
    for array in (*case.x, *case.expert_ids, case.weights[0].gate):
        array.flags.writeable = False
    run(case)


def test_memory_is_named_by_buffer():
    with moxie.World.cpu(num_ranks=2) as world:
        memory = moxie.Layer(world, make_problem()).memory()
    assert memory["heap.x_in"] > 0 and all(isinstance(v, int) for v in memory.values())


def test_bf16_rounding_is_that_of_the_library():
    values = np.array([1.0, 1.00390625, 1.01171875, -2.7, np.inf, np.nan, 1e-40, 3.4e38], np.float32)
    bits = moxie.bf16.to_bits(values)
    assert bits.tolist()[:5] == [0x3F80, 0x3F80, 0x3F82, 0xC02D, 0x7F80]
    assert np.isnan(moxie.bf16.from_bits(bits)[5])
    back = moxie.bf16.from_bits(bits)
    assert np.array_equal(moxie.bf16.to_bits(back), bits)
