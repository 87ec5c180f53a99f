#!/usr/bin/env python3
"""Draws `rendezvous_scale.py --json` figures.

python bench/plot_scale.py bench/results/rendezvous_scale.json docs/images/rendezvous_scale.svg
"""

import json
import statistics
import sys
from pathlib import Path

import matplotlib as mpl

mpl.use("svg")
mpl.rcParams["svg.hashsalt"] = "ripstop"  # the same figures give the same file
from matplotlib import pyplot as plt  # noqa: E402

LINES = {
    "torch form": ("torch's c10d handler: first round", "#b0b0b0"),
    "form": ("ripstop: first round", "#0b7285"),
    "re-form": ("ripstop: next round after a loss (0.5 s of it waiting for a return)", "#e8590c"),
}


def main(source: str, target: str) -> None:
    raw = {int(size): row for size, row in json.loads(Path(source).read_text()).items()}
    figure, axes = plt.subplots(figsize=(8, 4))
    for name, (label, colour) in LINES.items():
        points = [(size, statistics.median(row[name])) for size, row in sorted(raw.items()) if name in row]
        axes.plot(*zip(*points, strict=True), "o-", label=label, color=colour)
        for size, seconds in points:
            place = {"textcoords": "offset points", "xytext": (0, 6), "ha": "center"}
            axes.annotate(f"{seconds:.2g}", (size, seconds), fontsize=8, **place)
    sizes = sorted(raw)
    pace = statistics.median(raw[sizes[-1]]["form"]) / sizes[-1]
    axes.plot(sizes, [pace * size for size in sizes], ":", color="#0b7285", alpha=0.5, label="linear growth")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.minorticks_off()
    axes.set_xlabel("nodes")
    axes.set_ylabel("seconds (log)")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
    figure.tight_layout()
    Path(target).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, metadata={"Date": None})


if __name__ == "__main__":
    main(*sys.argv[1:])
