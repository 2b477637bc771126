#!/usr/bin/env python3
"""Draws the losses of examples/train_moe_lm.py --json as an SVG. Needs nothing beside Python.

python examples/plot_losses.py training.json losses.svg
"""

import json
import sys
from pathlib import Path

WIDTH, HEIGHT, LEFT, BOTTOM = 720, 400, 50, 40  # pixels; margins of the axes
COLORS = ("#1f6feb", "#d1470f", "#2a7e3b")


def text(x: float, y: float, words: str, anchor: str = "middle") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{words}</text>'


def draw(record: dict) -> str:
    """record: what --json has written. Returns the SVG."""
    runs = record["runs"]
    steps = max(len(r["losses"]) for r in runs)
    low, high = min(min(r["losses"]) for r in runs), max(max(r["losses"]) for r in runs)
    right, top = WIDTH - 10, 10

    def at(step: float, loss: float) -> tuple[float, float]:
        x = LEFT + (right - LEFT) * step / max(steps - 1, 1)
        return x, top + (HEIGHT - BOTTOM - top) * (high - loss) / max(high - low, 1e-9)

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif"',
        ' font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
    ]
    for i in range(5):
        step, loss = (steps - 1) * i / 4, low + (high - low) * i / 4
        (x, _), (_, y) = at(step, low), at(0, loss)
        out += [
            f'<path d="M{LEFT} {y:.1f}H{right}" stroke="#ddd"/>',
            text(LEFT - 6, y + 4, f"{loss:.2f}", "end"),
            text(x, HEIGHT - BOTTOM + 16, f"{step:.0f}"),
        ]
    out.append(text((LEFT + right) / 2, HEIGHT - 6, "step; loss in nats per byte"))
    for i, (run, color) in enumerate(zip(runs, COLORS, strict=False)):
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(s, v) for s, v in enumerate(run["losses"])))
        width = 3 - 1.5 * i  # so that curves on each other are both seen
        out.append(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="{width}"/>')
        share = run["layers_ms"] / run["step_ms"]
        words = f"{run['layer']}: {run['tokens_per_s']:.0f} tokens/s, MoE layers {share:.0%} of a step"
        out.append(f'<rect x="{right - 330}" y="{top + 10 + 18 * i}" width="14" height="4" fill="{color}"/>')
        out.append(text(right - 310, top + 16 + 18 * i, words, "start"))
    words = f"{record['ranks']} x {record['device']}, {record['arguments']['dtype']}"
    out.append(text(right - 310, top + 16 + 18 * len(runs), words, "start"))
    return "\n".join([*out, "</svg>"]) + "\n"


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    Path(sys.argv[2]).write_text(draw(json.loads(Path(sys.argv[1]).read_text())))
