"""Timelines of passes.

    trace = moxie.trace.Trace()
    layer.infer(..., trace=trace)
    moxie.trace.write("timeline", [trace])

Those of the simulator are of the same kind.
"""

import os
from collections.abc import Sequence
from pathlib import Path

from moxie._moxie import Trace, TraceEvent
from moxie._moxie import trace_json as to_json
from moxie._moxie import trace_svg as to_svg

__all__ = ["Trace", "TraceEvent", "to_json", "to_svg", "write"]


def write(
    prefix: str | os.PathLike[str],
    passes: Sequence[Trace],
    *,
    title: str = "Moxie: one MoE layer in one pass",
    subtitle: str = "",
) -> list[Path]:
    """Writes PREFIX.svg (a picture) and PREFIX.json (for ui.perfetto.dev, and for the verb trace of the command).

    Returns both paths. Raises OSError. Each file appears whole or not at all.
    """
    texts = {".svg": to_svg(list(passes), title=title, subtitle=subtitle), ".json": to_json(list(passes))}
    paths = []
    for suffix, text in texts.items():
        path = Path(f"{os.fspath(prefix)}{suffix}")
        staged = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            staged.write_text(text, encoding="utf-8")
            staged.replace(path)
        finally:
            staged.unlink(missing_ok=True)
        paths.append(path)
    return paths
