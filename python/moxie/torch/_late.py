"""Functions that torch may keep for ever.

The dispatcher never frees what is registered with it, not even at exit, and nanobind reports each of its types that is
still alive then. So what is registered finds its function by name when it is called, and holds nothing of Moxie; this
file imports nothing of Moxie for the same reason.
"""

import sys
from collections.abc import Callable
from typing import Any


def late(module: str, name: str) -> Callable[..., Any]:
    """A function that calls the module's function of that name."""

    def call(*arguments: Any, **named: Any) -> Any:
        return getattr(sys.modules[module], name)(*arguments, **named)

    return call
