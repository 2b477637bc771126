"""What people get wrong: one clear exception each, with the values in it."""

import numpy as np
import pytest
from cases import make_case, make_problem

import moxie

PROBLEM = make_problem(ranks=2, max_tokens=16)


@pytest.fixture
def case(rng):
    return make_case(PROBLEM, rng, tokens=(9, 4))


@pytest.fixture
def layer():
    with moxie.World.cpu(num_ranks=2, timeout_s=60) as world:
        yield moxie.Layer(world, PROBLEM)


def set_x(change):
    def apply(case):
        case.x[1] = change(case.x[1])

    return apply


def set_id(value):
    def apply(case):
        case.expert_ids[1][2, 1] = value

    return apply


def misaligned(x):
    raw = np.zeros(x.nbytes + 1, np.uint8)[1:]
    return raw.view(np.float32).reshape(x.shape)


def drop(name):
    def apply(case):
        setattr(case.weights[1], name, None)

    return apply


def give_bias(case):
    case.weights[0].gate_bias = np.zeros((3, 64), np.float32)


def too_many(case):
    case.x[0] = np.zeros((17, 64), np.float32)
    case.expert_ids[0] = np.zeros((17, 2), np.int32)
    case.route_weights[0] = np.zeros((17, 2), np.float32)


# what is done to the inputs, exception, words of the sentence
FORWARD = {
    "float64": (set_x(lambda x: x.astype(np.float64)), moxie.InvalidArgumentError,
                "x of rank 1 is [4, 64] float64, must be float32"),
    "float16": (set_x(lambda x: x.astype(np.float16)), ValueError, "is [4, 64] float16, must be float32"),
    "bits of BF16 where float32 is wanted": (set_x(moxie.bf16.to_bits), ValueError, "uint16, must be float32"),
    "big-endian": (set_x(lambda x: x.astype(">f4")), ValueError, "type >f4, must be float32 in native byte order"),
    "objects": (set_x(lambda x: x.astype(object)), ValueError, "type object, must be float32"),
    "shape": (set_x(lambda x: x[:, :32].copy()), ValueError, "x of rank 1 is [4, 32] f32, must be [T, 64] f32"),
    "flat": (set_x(lambda x: x.reshape(-1)), ValueError, "x of rank 1 is [256] f32, must be [T, 64] f32"),
    "scalar": (set_x(lambda x: np.float32(1).reshape(())), ValueError, "has 0 dimensions"),
    "four dimensions": (set_x(lambda x: x.reshape(1, 1, 4, 64)), ValueError, "has 4 dimensions"),
    "column order": (set_x(np.asfortranarray), ValueError,
                     "x of rank 1 is [4, 64] with strides [1, 4] (in elements), must be C-contiguous"),
    "every other row": (set_x(lambda x: np.repeat(x, 2, 0)[::2]), ValueError, "strides [128, 1]"),
    "misaligned": (set_x(misaligned), ValueError, "no multiple of 4 bytes"),
    "list of numbers": (set_x(lambda x: x.tolist()), moxie.ArgumentTypeError, "x of rank 1 is of type list"),
    "absent": (set_x(lambda x: None), ValueError, "x of rank 1 is absent"),
    "too many ranks": (lambda c: c.x.append(c.x[0]), ValueError, "x has 3 entries, must have one per rank"),
    "too few ranks": (lambda c: c.weights.pop(), ValueError, "weights has 1 entries"),
    "one array for all ranks": (lambda c: setattr(c, "x", c.x[0]), TypeError,
                                "x is of type ndarray, must be a list with one entry for each of 2 ranks"),
    "weights as dict": (lambda c: c.weights.__setitem__(0, {}), TypeError,
                        "weights of rank 0 is of type dict, must be moxie.Weights"),
    "missing weight": (drop("down"), ValueError, "weights.down of rank 1 is absent, must be [3, 64, 64] f32"),
    "weight without a part": (give_bias, ValueError,
                              "weights.gate_bias of rank 0 was given, must be absent because problem.expert_bias"),
    "more tokens than max_tokens": (too_many, ValueError,
                                    "x of rank 0 has 17 tokens, must be between 0 and max_tokens 16"),
    "ids of int16": (lambda c: c.expert_ids.__setitem__(0, c.expert_ids[0].astype(np.int16)), ValueError,
                     "expert_ids of rank 0 is [9, 2] int16, must be int32 or int64"),
    "ids of another token count": (lambda c: c.expert_ids.__setitem__(0, c.expert_ids[0][:5]), ValueError,
                                   "expert_ids of rank 0 is [5, 2] i32, must be [9, 2]"),
    "route beyond E": (set_id(6), moxie.InvalidRouteError,
                       "expert id of rank 1 token 2 slot 1 is 6, must be between 0 and 5"),
    "route below -1": (set_id(-2), ValueError, "is -2, must be between 0 and 5 or -1"),
}  # fmt: skip


@pytest.mark.parametrize("what", FORWARD)
def test_forward(what, case, layer):
    change, kind, words = FORWARD[what]
    expected = layer.infer(**case.inputs)
    good = make_case(PROBLEM, np.random.default_rng(1), tokens=(9, 4))
    change(case)
    with pytest.raises(kind) as caught:
        layer.forward(**case.inputs)
    assert isinstance(caught.value, moxie.Error) and words in caught.value.what
    assert str(caught.value) == caught.value.what and isinstance(caught.value.code, moxie.ErrorCode)
    layer.infer(**good.inputs)  # the layer is as good as before
    assert len(expected) == 2


OUTPUTS = {
    "read-only": (lambda c: [np.frombuffer(bytes(c.x[0].nbytes), np.float32).reshape(c.x[0].shape), c.dy[1]],
                  "y of rank 0 is read-only, must be writable"),
    "dtype": (lambda c: [c.dy[0].astype(np.float64), c.dy[1]], "y of rank 0 is [9, 64] float64"),
    "in place": (lambda c: [c.x[0], c.dy[1]], "y of rank 0 shares memory with x of rank 0"),
    "part of an input": (lambda c: [c.dy[0], c.x[0][2:6]], "y of rank 1 shares memory with x of rank 0"),
    "twice": (lambda c: [c.dy[0], c.dy[0][:4]], "shares memory with y of rank"),
    "shape": (lambda c: [c.dy[0][:3], c.dy[1]], "y of rank 0 is [3, 64] f32, must be [9, 64] f32"),
}  # fmt: skip


@pytest.mark.parametrize("what", OUTPUTS)
def test_out(what, case, layer):
    make, words = OUTPUTS[what]
    with pytest.raises(moxie.InvalidArgumentError) as caught:
        layer.forward(**case.inputs, out=make(case))
    assert words in caught.value.what


def test_backward(case, layer):
    _, context = layer.forward(**case.inputs)
    good = case.backward_inputs

    def refused(kind, words, /, **changes):
        with pytest.raises(kind) as caught:
            layer.backward(context, **{**good, **changes})
        assert words in str(caught.value)

    refused(ValueError, "dy of rank 0 is [4, 64] f32, must be [9, 64] f32", dy=case.dy[::-1])
    refused(ValueError, "grads.gate of rank 0 is absent with accumulate", accumulate=True)
    refused(ValueError, "grads_dtype is bf16", grads_dtype=moxie.DType.bf16)
    refused(TypeError, "out of rank 0 is of type Weights, must be moxie.Gradients", out=case.weights)
    with pytest.raises(ValueError, match="belongs to another layer"):
        moxie.Layer(layer.world, PROBLEM).backward(context, **good)
    layer.backward(context, **good)


PROBLEMS = {
    "hidden": ({"hidden": 100}, "hidden is 100"),
    "experts": ({"experts": 0}, "num_experts is 0"),
    "ranks of the world": ({"ranks": 3}, "problem.num_ranks is 3, must be the world's number of ranks"),
    "ids as storage": ({"dtype": moxie.DType.i32}, "dtype is i32"),
}


@pytest.mark.parametrize("what", PROBLEMS)
def test_problem(what):
    changes, words = PROBLEMS[what]
    with moxie.World.cpu(num_ranks=2) as world, pytest.raises(moxie.InvalidArgumentError) as caught:
        moxie.Layer(world, make_problem(**changes))
    assert words in caught.value.what and caught.value.code == moxie.ErrorCode.invalid_argument


def test_plan():
    bad = moxie.Plan(order=moxie.TaskOrder.lag, x_ring_blocks=1, band_blocks=4)
    problem = make_problem(max_tokens=2000)
    with moxie.World.cpu(num_ranks=2) as world, pytest.raises(moxie.InvalidPlanError, match="x_ring") as caught:
        moxie.Layer(world, problem, bad)
    assert caught.value.code == moxie.ErrorCode.invalid_plan


def test_keywords_only():
    with pytest.raises(TypeError):
        moxie.Problem(2, 16, 64, 64, 6, 2)
    with pytest.raises(TypeError):
        moxie.Plan(num_slab=2)


def test_capacity(rng):
    problem = make_problem(max_tokens=300)
    case = make_case(problem, rng, tokens=(300, 300), routing="one")
    with moxie.World.cpu(num_ranks=2) as world:
        layer = moxie.Layer(world, problem, moxie.Plan(capacity_rows=384))
        with pytest.raises(moxie.CapacityExceededError, match="must be at most plan.capacity_rows 384"):
            layer.infer(**case.inputs)


def test_non_finite(case):
    case.x[1][3, 5] = np.nan
    with moxie.World.cpu(num_ranks=2, validate_finite=True) as world:
        with pytest.raises(moxie.NonFiniteError, match=r"x of rank 1 is nan at \[3, 5\]"):
            moxie.Layer(world, PROBLEM).infer(**case.inputs)


def test_lost_rank(case):
    lost = moxie.FaultInjection(kill_rank=1, kill_after_steps=3)
    with moxie.World.cpu(num_ranks=2, timeout_s=0.3, faults=lost) as world:
        layer = moxie.Layer(world, PROBLEM)
        with pytest.raises(moxie.WaitTimeoutError) as caught:
            layer.infer(**case.inputs)
        assert isinstance(caught.value, TimeoutError) and caught.value.code == moxie.ErrorCode.timeout
        record = caught.value.waits[0]
        assert record.epoch == 1 and record.seen < record.wanted and record.what
        assert world.stopped
        with pytest.raises(moxie.WorldStoppedError):
            layer.infer(**case.inputs)
        world.set_faults(moxie.FaultInjection())
        world.reset()
        assert not world.stopped
        layer.infer(**case.inputs)


@pytest.mark.skipif(moxie.has_cuda, reason="this build has CUDA")
def test_cuda_is_unavailable():
    with pytest.raises(moxie.UnavailableError) as caught:
        moxie.World.cuda(num_ranks=1)
    assert caught.value.code == moxie.ErrorCode.unavailable
