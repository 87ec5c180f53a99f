#!/usr/bin/env python3
"""Draws `recovery.py --json` figures: python bench/plot.py bench/results/recovery.json docs/images/recovery.svg"""

import json
import statistics
import sys
from pathlib import Path

import matplotlib as mpl

mpl.use("svg")
mpl.rcParams["svg.hashsalt"] = "ripstop"  # the same figures give the same file
from matplotlib import pyplot as plt  # noqa: E402

COLOURS = ("#b0b0b0", "#0b7285")


def main(source: str, target: str) -> None:
    raw = json.loads(Path(source).read_text())
    scenarios = [s for s in raw if not s.endswith("mem")]
    launchers = list(next(iter(raw.values())))
    figure, axes = plt.subplots(figsize=(8, 3.6))
    width = 0.8 / len(launchers)
    medians = {
        launcher: [statistics.median(v for v in raw[s][launcher] if v is not None) for s in scenarios]
        for launcher in launchers
    }
    for i, launcher in enumerate(launchers):
        at = [x + (i - (len(launchers) - 1) / 2) * width for x in range(len(scenarios))]
        bars = axes.bar(at, medians[launcher], width, label=launcher, color=COLOURS[i % len(COLOURS)])
        axes.bar_label(bars, [f"{v:.2g}" for v in medians[launcher]], fontsize=8)
    ratios = [medians[launchers[0]][i] / medians[launchers[-1]][i] for i in range(len(scenarios))]
    labels = [f"{s}\n{r:.0f}x" if r >= 10 else f"{s}\n{r:.1f}x" for s, r in zip(scenarios, ratios, strict=True)]
    axes.set_xticks(range(len(scenarios)), labels)
    axes.set_yscale("log")
    axes.set_ylabel("seconds (log)")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.tight_layout()
    Path(target).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, metadata={"Date": None})


if __name__ == "__main__":
    main(*sys.argv[1:])
