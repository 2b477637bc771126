"""Planner, simulator, device records and presets through Python."""

import json

import pytest

import moxie
from moxie import planner


@pytest.fixture(scope="module")
def machine():
    return planner.find_device("h200").machine()


@pytest.fixture(scope="module")
def problem():
    return moxie.find_preset("qwen3-30b-a3b").problem(num_ranks=2, max_tokens=2048)


def test_presets():
    names = [p.name for p in moxie.presets()]
    assert {"mixtral-8x7b", "deepseek-v3", "gpt-oss-120b"} <= set(names)
    problem = moxie.find_preset("gpt-oss-120b").problem(num_ranks=4, max_tokens=512)
    problem.check()
    assert problem.expert_bias and problem.activation.kind == moxie.ActivationKind.gpt_oss
    assert [len(problem.experts_of(r)) for r in range(4)] == [32] * 4
    with pytest.raises(moxie.InvalidArgumentError, match="mixtral-8x7b"):
        moxie.find_preset("mixtral")
    with pytest.raises(ValueError, match="rank of experts_of is 4, must be between 0 and 3"):
        problem.experts_of(4)


def test_problem_is_plain_data():
    problem = moxie.Problem(max_tokens=8, hidden=64, intermediate=64, num_experts=4, top_k=2)
    again = eval(repr(problem), vars(moxie))
    assert again == problem
    again.shared.intermediate = 128
    assert again != problem and again.shared == moxie.SharedExpert(intermediate=128)


def test_plan_is_plain_data(problem):
    plan = moxie.default_plan(problem)
    assert eval(repr(plan), vars(moxie)) == plan
    resolved = plan.resolve(problem)
    assert resolved.x_ring_blocks > 0 and plan.x_ring_blocks == 0
    with pytest.raises(moxie.InvalidPlanError):
        moxie.Plan(order=moxie.TaskOrder.lag, band_blocks=8, x_ring_blocks=2).resolve(problem)


def test_devices(machine):
    assert {"h200", "gb300"} <= set(planner.device_names())
    record = planner.find_device("gb300")
    assert record.constants["num_sms"]["value"] > 0 and record.constants["num_sms"]["source"]
    assert machine.values["num_sms"] == 132 and machine.clock_mhz > 1000
    hot = planner.find_device("h200").machine(load=planner.Load.sustained)
    assert hot.clock_mhz < machine.clock_mhz
    with pytest.raises(moxie.InvalidArgumentError, match="h200"):
        planner.find_device("h20")
    with pytest.raises(moxie.InvalidArgumentError):
        planner.parse_device(json.dumps({"name": "mine", "title": "nothing known"}))


def test_a_layer_says_where_its_plan_is_from():
    small = moxie.Problem(num_ranks=1, max_tokens=8, hidden=64, intermediate=64, num_experts=4, top_k=2)
    with moxie.World.cpu(num_ranks=1) as world:
        assert moxie.Layer(world, small).plan_source.startswith("default: no plan cache")
        assert moxie.Layer(world, small, moxie.Plan()).plan_source == "given by the caller"


def test_choose_plan(problem, machine):
    choice = planner.choose_plan(problem=problem, machine=machine, passes=planner.Passes.forward, all_ranks=False)
    assert 0 < choice.forward_bounds.lower_ms < choice.chosen.forward_ms <= choice.default_plan.forward_ms
    assert choice.chosen.backward_ms == 0 and choice.chosen.memory_gb > 0
    assert len(choice.alternatives) > 0 and choice.alternatives[0].what
    assert choice.why in planner.explain(choice)
    choice.chosen.plan.resolve(problem)  # legal
    with pytest.raises(moxie.InvalidPlanError):
        planner.choose_plan(problem=problem, machine=machine, memory_gb=1e-6)


@pytest.mark.parametrize("name", ["dedupe", "fused_activation", "mxfp8", "wave_barrier"])
def test_mechanisms_are_what_was_asked_for(name):
    plain = planner.Mechanisms()
    other = planner.Mechanisms(**{name: not getattr(plain, name)})
    for each in ("dedupe", "fused_activation", "mxfp8", "wave_barrier"):
        assert (getattr(other, each) == getattr(plain, each)) == (each != name)


def test_bounds_and_simulate(problem, machine):
    bounds = planner.bounds(problem=problem, machine=machine)
    result = planner.simulate(problem=problem, machine=machine, one_rank=True)
    assert bounds.lower_ms == max(bounds.gemm_ms, bounds.memory_ms, bounds.link_ms, bounds.network_ms)
    assert result.ms > bounds.lower_ms and result.trace.events == []
    assert sum(result.cta_seconds.values()) > 0
    again = planner.simulate(problem=problem, machine=machine, one_rank=True)
    assert again.ms == result.ms
    skewed = planner.simulate(
        problem=problem,
        machine=machine,
        tokens=[2048, 0],
        routing=planner.RoutingSpec(skew=planner.Skew.zipf, exponent=1.2),
        direction=planner.Direction.backward,
        trace=True,
    )
    assert len(skewed.rank_ms) == 2 and skewed.trace.events
    with pytest.raises(moxie.InvalidArgumentError, match="tokens of rank 1 is 4000"):
        planner.simulate(problem=problem, machine=machine, tokens=[1, 4000])
    with pytest.raises(moxie.InvalidArgumentError, match="tokens has 1 entries"):
        planner.simulate(problem=problem, machine=machine, tokens=[1])
