"""Fixtures of the Python tests. Random tests take `rng`: its seed is printed when a test fails, MOXIE_TEST_SEED=N
runs them all with that seed."""

import os

import numpy as np
import pytest

os.environ["MOXIE_PLAN_CACHE"] = "off"  # plans are those of the tests


@pytest.fixture
def seed(request):
    value = int(os.environ.get("MOXIE_TEST_SEED", "0")) or 1 + sum(map(ord, request.node.nodeid)) % 100_000
    print(f"seed {value}; rerun: MOXIE_TEST_SEED={value} pytest '{request.node.nodeid}'")
    return value


@pytest.fixture
def rng(seed):
    return np.random.default_rng(seed)
