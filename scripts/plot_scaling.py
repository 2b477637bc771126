#!/usr/bin/env python3
"""Draws results of `moxie bench layer` over the number of GPUs: useful TFLOPS of the busiest GPU, one panel for each shape
and routing, burst.

    scripts/plot_scaling.py scaling.svg bench/results/h200-scaling-forward.json [more result files of that direction]

Circles: published rows of a fused kernel over NVSHMEM on H200 (LigerCute, 8,192 tokens per rank). Needs matplotlib."""

import json
import sys

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

LINES = {
    "gemm_only_ms": ("grouped products alone (PyTorch)", "#9aa5b1", "-"),
    "moxie_ms": ("Moxie", "#b5432e", "-"),
    "predicted_ms": ("Moxie, predicted", "#b5432e", ":"),
    "nccl_torch_ms": ("NCCL + PyTorch", "#3b6ea5", "-"),
}
PUBLISHED = {
    ("forward", "qwen3-30b, 8192 tokens"): {1: 345, 2: 307, 4: 274, 8: 238},
    ("backward", "qwen3-30b, 8192 tokens"): {1: 194, 2: 215, 4: 207, 8: 211},
    ("forward", "mixtral-8x7b"): {1: 613, 2: 534, 4: 548, 8: 533},
    ("backward", "mixtral-8x7b"): {1: 406, 2: 384, 4: 398, 8: 400},
}


def tflops(row, key):
    return row["tflops"] * row["moxie_ms"] / row[key]


def draw(axes, direction, shape, routing, rows):
    rows = sorted(rows, key=lambda row: row["ranks"])
    for key, (label, colour, style) in LINES.items():
        known = [row for row in rows if row[key] is not None]
        points = [tflops(row, key) for row in known]
        axes.plot([row["ranks"] for row in known], points, style, color=colour, label=label, marker=".")
    published = PUBLISHED.get((direction, shape), {}) if routing == "uniform" else {}
    axes.plot(list(published), list(published.values()), "o", color="black", fillstyle="none")
    axes.set_xscale("log", base=2)
    axes.set_xticks([row["ranks"] for row in rows], [row["ranks"] for row in rows])
    axes.set_ylim(bottom=0)
    axes.set_title(f"{shape}, {routing}", fontsize=8)
    axes.tick_params(labelsize=7)


def main(out, files):
    reports = [json.loads(open(file).read()) for file in files]
    rows = [row for report in reports for row in report["rows"]]
    directions = {row["direction"] for row in rows}
    if len(directions) != 1:
        sys.exit(f"the files have {' and '.join(sorted(directions))} rows; one direction at a time")
    shapes = list(dict.fromkeys(row["shape"] for row in rows))
    routings = list(dict.fromkeys(row["routing"] for row in rows))
    figure, panels = plt.subplots(
        len(shapes),
        len(routings),
        figsize=(3 * len(routings), 2.2 * len(shapes)),
        squeeze=False,
        layout="constrained",
    )
    direction = directions.pop()
    for i, shape in enumerate(shapes):
        for j, routing in enumerate(routings):
            chosen = [row for row in rows if row["shape"] == shape and row["routing"] == routing]
            draw(panels[i][j], direction, shape, routing, chosen)
    figure.legend(*panels[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize=8)
    figure.suptitle(f"{direction}: TFLOPS per GPU over the number of GPUs", fontsize=10)
    figure.savefig(out)


if len(sys.argv) < 3:
    sys.exit(__doc__)
main(sys.argv[1], sys.argv[2:])
