#!/usr/bin/env python3
"""Draws a study of `moxie simulate --study NAME --json`: simulated rows as bars, published ones as marks, one panel per
unit.

    moxie simulate --study minibatch --json | scripts/plot_study.py minibatch.svg

Needs matplotlib."""

import json
import sys

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

COLOURS = {"prediction": "#3b6ea5", "calibrated": "#9aa5b1", "-": "#7fb08a"}


def draw(axes, unit, rows):
    places = range(len(rows))
    axes.barh(places, [r["simulated"] for r in rows], color=[COLOURS[r["kind"]] for r in rows])
    for place, row in zip(places, rows, strict=True):
        if row["published"] is not None:
            axes.plot([row["published"]], [place], "D", color="#b5432e", markersize=6)
    axes.set_yticks(list(places), [r["label"].strip() for r in rows], fontsize=8)
    axes.set_xlabel(unit, fontsize=8)
    axes.set_ylim(len(rows) - 0.4, -0.6)


if len(sys.argv) != 2:
    sys.exit(__doc__)
study = json.load(sys.stdin)
panels = {}
for row in study["rows"]:
    panels.setdefault(row["unit"], []).append(row)
heights = [0.6 + 0.28 * len(rows) for rows in panels.values()]
figure, all_axes = plt.subplots(
    len(panels), figsize=(9, 0.6 + sum(heights)), height_ratios=heights, squeeze=False, layout="constrained"
)
for axes, (unit, rows) in zip(all_axes[:, 0], panels.items(), strict=True):
    draw(axes, unit, rows)
figure.suptitle(
    study["title"] + "\nbars: simulated (grey: calibrated on this row, green: nothing published), diamonds: published",
    fontsize=9,
)
figure.savefig(sys.argv[1])
