"""Fixtures of the tests with PyTorch: each marked `torch`, each skipped where PyTorch is missing, most of them run on
the CPU twin and on a GPU. `pytest -m torch` runs only these."""

import importlib.util

import pytest


def pytest_collection_modifyitems(items):
    for item in items:
        if "with_torch" in item.path.parts:
            item.add_marker(pytest.mark.torch)


@pytest.fixture(params=["cpu", "cuda"])
def place(request):
    """Where a test runs. plain.Place is imported late: this file is read without PyTorch, too."""
    if importlib.util.find_spec("torch") is None:
        pytest.skip("PyTorch is not installed")
    import plain

    place = plain.Place(request.param)
    if request.param == "cuda" and (why := plain.no_gpu()):
        pytest.skip(why)
    yield place
    place.close()


@pytest.fixture
def generator(seed):
    import torch

    torch.manual_seed(seed)
    return torch.Generator().manual_seed(seed)
