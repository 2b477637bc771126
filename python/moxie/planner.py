"""Planner and simulator: which plan for a layer on a machine, what it will take, and why.

    machine = moxie.planner.find_device("h200").machine()
    problem = moxie.find_preset("qwen3-30b-a3b").problem(num_ranks=2, max_tokens=8192)
    choice = moxie.planner.choose_plan(problem=problem, machine=machine)
    print(choice.chosen.forward_ms, moxie.planner.explain(choice))

Needs no GPU. docs/planner.md tells how it works.
"""

from moxie._moxie import (
    Bounds,
    DeviceRecord,
    Direction,
    LinkUse,
    Load,
    Machine,
    Mechanisms,
    Passes,
    PlanChoice,
    RatedPlan,
    RoutingSpec,
    SimResult,
    Skew,
    Workers,
    bounds,
    choose_plan,
    device_names,
    explain,
    find_device,
    parse_device,
    simulate,
)

__all__ = [
    "Bounds",
    "DeviceRecord",
    "Direction",
    "LinkUse",
    "Load",
    "Machine",
    "Mechanisms",
    "Passes",
    "PlanChoice",
    "RatedPlan",
    "RoutingSpec",
    "SimResult",
    "Skew",
    "Workers",
    "bounds",
    "choose_plan",
    "device_names",
    "explain",
    "find_device",
    "parse_device",
    "simulate",
]
