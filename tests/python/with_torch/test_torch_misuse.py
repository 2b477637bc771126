"""What a user can get wrong: one exception each, of the right class, whose sentence names the rule and the value."""

import pickle
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import moxie.torch as mt  # noqa: E402
import plain  # noqa: E402
from plain import make_inputs, make_module, make_problem  # noqa: E402

import moxie  # noqa: E402


@pytest.fixture
def parts(generator):
    """A module of two CPU ranks and inputs that are right."""
    place = plain.Place("cpu")
    module = make_module(place, make_problem(num_ranks=2), generator)
    x, ids, route_weights, _ = make_inputs(module.layer.problem, 12, generator)
    yield module, {"x": x, "expert_ids": ids, "route_weights": route_weights}
    place.close()


WRONG = {
    "another hidden size": ({"x": torch.zeros(12, 32)}, r"x is \[12, 32\], must be \[\.\.\., 64\]"),
    "dtype": ({"x": torch.zeros(12, 64).bfloat16()}, "x is torch.bfloat16, must be torch.float32"),
    "transposed": ({"x": torch.zeros(64, 12).T}, r"x has strides \[1, 12\], must be contiguous; \.contiguous\(\)"),
    "permuted": ({"x": torch.zeros(4, 3, 64).transpose(0, 1)}, r"x has strides \[64, 192, 1\], must be contiguous"),
    "too many tokens": (
        {"x": torch.zeros(81, 64), "expert_ids": torch.zeros(81, 2).long(), "route_weights": torch.zeros(81, 2)},
        r"x has 81 tokens, must be between 0 and 80 .*nearest legal value 80",
    ),
    "ids of another K": ({"expert_ids": torch.zeros(12, 3).long()}, r"expert_ids is \[12, 3\], must be \[12, 2\]"),
    "ids of another T": ({"expert_ids": torch.zeros(11, 2).long()}, r"expert_ids is \[11, 2\], must be \[12, 2\]"),
    "ids as floats": ({"expert_ids": torch.zeros(12, 2)}, "expert_ids is torch.float32, must be torch.int32 or"),
    "BF16 weights of routes": (
        {"route_weights": torch.zeros(12, 2).bfloat16()},
        "route_weights is torch.bfloat16, must be torch.float32",
    ),
    "on another device": ({"x": torch.zeros(12, 64, device="meta")}, "x is on meta, must be on cpu"),
    "ids only": ({"route_weights": None}, "must be given together"),
    "nothing": ({"expert_ids": None, "route_weights": None}, "the module was made without a router"),
}


@pytest.mark.parametrize("what", WRONG)
@pytest.mark.parametrize("grad", [False, True])
def test_inputs(parts, what, grad):
    module, arguments = parts
    changes, words = WRONG[what]
    with torch.set_grad_enabled(grad), pytest.raises(moxie.InvalidArgumentError, match=words):
        module(**{**arguments, **changes})
    module(**arguments)


def test_route_that_does_not_exist(parts):
    module, arguments = parts
    bad = arguments["expert_ids"].clone()
    bad[7, 1] = 5  # rank 1's token 1
    with pytest.raises(moxie.InvalidRouteError, match="expert id of rank 1 token 1 slot 1 is 5"):
        module(**{**arguments, "expert_ids": bad})
    module(**arguments)


def test_a_moved_or_cast_module(parts):
    module, arguments = parts
    module.bfloat16()
    with pytest.raises(moxie.InvalidArgumentError, match="weights.gate is torch.bfloat16, must be torch.float32"):
        module(**arguments)
    module.float()
    module(**arguments)
    module.to("meta")
    with pytest.raises(moxie.InvalidArgumentError, match="weights.gate is on meta, must be on cpu"):
        module(**arguments)


def test_after_close(parts):
    module, arguments = parts
    y = module(**arguments)
    module.layer.world.close()
    with pytest.raises(moxie.ClosedError, match="World that is closed"):
        module(**arguments)
    with pytest.raises(moxie.ClosedError):
        y.sum().backward()
    with pytest.raises(moxie.ClosedError):
        mt.MoE(make_problem(num_ranks=2), module.layer.world)


def test_problem_and_world_do_not_match(parts):
    module, _ = parts
    with pytest.raises(moxie.InvalidArgumentError, match="problem.num_ranks is 1, must be the world's"):
        mt.MoE(make_problem(), module.layer.world)
    with pytest.raises(moxie.InvalidArgumentError, match="hidden is 100"):
        mt.MoE(make_problem(num_ranks=2, hidden=100), module.layer.world)
    with pytest.raises(moxie.InvalidArgumentError, match="device is cuda:0, must be that of the World's other layers"):
        mt.MoE(make_problem(num_ranks=2), module.layer.world, device="cuda:0")
    with pytest.raises(moxie.InvalidArgumentError, match="device is cuda, must be where the World is, cpu"):
        mt.MoE(make_problem(), moxie.World.cpu(), device="cuda")
    with pytest.raises(moxie.InvalidArgumentError, match="gate_up is 'split', must be 'separate' or 'fused'"):
        mt.MoE(make_problem(num_ranks=2), module.layer.world, gate_up="split")


def test_weights_of_the_function(parts, generator):
    module, arguments = parts
    w = module.stacked_weights()

    def refused(words, **weights):
        with pytest.raises(moxie.InvalidArgumentError, match=words):
            mt.moe(**arguments, weights=mt.ExpertWeights(**weights), layer=module.layer)

    refused(r"weights.up is None, must be a tensor \[5, 128, 64\]", gate=w["gate"], down=w["down"])
    both = torch.stack([w["gate"], w["up"]])
    refused("weights.gate was given, must be None", gate=w["gate"], gate_up=both, down=w["down"])
    refused(r"weights.down is \[5, 128, 64\], must be \[5, 64, 128\]", gate=w["gate"], up=w["up"], down=w["up"])
    refused("weights.gate is a tensor, must be a list of 5", gate=w["gate"], up=w["up"], down=list(w["down"]))
    refused("weights.gate is a list of 5, must be a tensor", gate=list(w["gate"]), up=w["up"], down=w["down"])
    refused("weights.shared_gate was given, must be None", **w, shared_gate=w["gate"][0])


def test_main_gradients(parts):
    module, arguments = parts
    module.gate.main_grad = torch.zeros_like(module.gate)
    with pytest.raises(moxie.InvalidArgumentError, match="weight 1 of 3 has no main_grad"):
        module(**arguments)
    module.make_main_grads()
    module.up.main_grad = torch.zeros_like(module.up).bfloat16()
    with pytest.raises(moxie.InvalidArgumentError, match=r"main_grad of weight 1 is \[5, 128, 64\] torch.bfloat16"):
        module(**arguments)


def test_input_buffer(parts):
    module, _ = parts
    with pytest.raises(moxie.InvalidArgumentError, match="in a process with 2 ranks"):
        module.input_buffer(4)
    with moxie.World.cpu() as world:
        module = mt.MoE(make_problem(), world)
        with pytest.raises(moxie.InvalidArgumentError, match="num_tokens of input_buffer is 41"):
            module.input_buffer(41)
        x = module.input_buffer(3).zero_()
        ids, route_weights = torch.zeros(3, 2).long(), torch.zeros(3, 2)
        with pytest.raises(moxie.InvalidArgumentError, match="x lies in the input buffer"):
            module(x, ids, route_weights)
        del x


def test_captures_need_layers_and_contexts_before(parts, monkeypatch):
    """What is refused while a CUDA graph is captured, with a capture that is only said to be one."""
    module, arguments = parts
    monkeypatch.setattr("moxie.torch.layers.is_capturing", lambda: True)
    with pytest.raises(moxie.InvalidArgumentError, match="no context is free .* reserve_contexts"):
        module(**arguments)
    with pytest.raises(moxie.InvalidArgumentError, match="a layer was made in a CUDA graph capture"):
        mt.MoE(make_problem(num_ranks=2, max_tokens=8), module.layer.world)
    module.reserve_contexts(1)
    y = module(**arguments)
    del y
    assert module.layer.num_contexts == 1, "the graph keeps it"
    with pytest.raises(moxie.InvalidArgumentError, match="no context is free"):
        module(**arguments)
    with torch.no_grad():
        module(**arguments)


def test_pickle(parts):
    module, _ = parts
    with pytest.raises(moxie.InvalidArgumentError, match="save the state_dict"):
        pickle.dumps(module)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu():
    with pytest.raises(moxie.UnavailableError, match="device='cpu' runs the CPU twin"):
        mt.local_world("cuda")
    assert mt.local_world().backend == "cpu" and mt.local_world() is mt.local_world("cpu")
    with pytest.raises(moxie.InvalidArgumentError, match="device is meta, must be cpu or cuda"):
        mt.local_world("meta")


def test_a_group_before_there_is_one():
    with pytest.raises(moxie.InvalidArgumentError, match="before torch.distributed.init_process_group"):
        mt.world_from_group()


def test_moxie_never_imports_torch():
    code = "import sys, moxie, moxie.checkpoint; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
    code = "import sys; sys.modules['torch'] = None; import moxie.torch"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 1 and "UnavailableError: moxie.torch needs PyTorch 2.6 or newer" in run.stderr
