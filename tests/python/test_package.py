"""What is installed: public names, stubs that match, version."""

import importlib.metadata
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import moxie
from moxie import _moxie

ROOT = Path(__file__).resolve().parents[2]


def test_public_names_exist_and_have_documentation():
    for module in (moxie, moxie.planner, moxie.trace, moxie.bf16, moxie.checkpoint):
        for name in module.__all__:
            thing = getattr(module, name)
            if inspect.isclass(thing) or inspect.isroutine(thing):
                assert thing.__doc__, f"{module.__name__}.{name}"
    private = {"trace_json", "trace_svg", "Trace", "TraceEvent", *moxie.planner.__all__}
    public = {n for n in vars(_moxie) if not n.startswith("_")}
    assert public <= set(moxie.__all__) | private, "a binding that no module of the package names"


def test_version():
    assert moxie.__version__ == importlib.metadata.version("moxie-moe")


def test_stubs_match():
    """python/moxie/_moxie.pyi is what nanobind's stubgen writes for the module that is installed."""
    pytest.importorskip("nanobind")
    run = subprocess.run([sys.executable, ROOT / "scripts/python_stubs", "--check"], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    installed = Path(moxie.__file__).with_name("_moxie.pyi")
    assert installed.read_text() == (ROOT / "python/moxie/_moxie.pyi").read_text()
    assert installed.with_name("py.typed").exists()
