#!/usr/bin/env python3
"""Draws a study of `moxie simulate --study NAME --json`: simulated rows as bars, published ones as marks.

    moxie simulate --study minibatch --json | scripts/plot_study.py minibatch.svg

Needs matplotlib."""
import json
import sys

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

if len(sys.argv) != 2:
    sys.exit(__doc__)
study = json.load(sys.stdin)
rows = study["rows"]
figure, axes = plt.subplots(figsize=(9, 1.2 + 0.28 * len(rows)))
places = range(len(rows))
colours = {"prediction": "#3b6ea5", "calibrated": "#9aa5b1", "-": "#7fb08a"}
axes.barh(places, [r["simulated"] for r in rows], color=[colours[r["kind"]] for r in rows])
for place, row in zip(places, rows):
    if row["published"] is not None:
        axes.plot([row["published"]], [place], "D", color="#b5432e", markersize=6)
axes.set_yticks(list(places), [f"{r['label'].strip()} ({r['unit']})" for r in rows], fontsize=8)
axes.invert_yaxis()
axes.set_title(study["title"] + "\nbars: simulated (grey: calibrated on this row), diamonds: published", fontsize=9)
figure.tight_layout()
figure.savefig(sys.argv[1])
