"""Draws the losses and step times of all modes, for `run.py`.

    python examples/cross_dc/draw.py depth.png 1ms=DIR/results.json 20ms=DIR/results.json

draws the mean step times of several runs side by side, for example of `--modes int8@1,int8@2,int8@4` with two delays.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

import matplotlib
import predict

matplotlib.use("Agg")
from matplotlib import pyplot

COLORS = {"plain": "#606060", "exact": "#f0a030", "int8": "#103060", "delta": "#a02020", "shared": "#40a060"}
# Losses differ from batch to batch by more than modes differ, so the curves are means of neighbouring steps.
SMOOTHED = 10


def draw(path: Path, modes: dict[str, Any], title: str) -> None:
    """Draws losses over steps, losses over time, and step times.

    Args:
        path: The picture.
        modes: The results of each mode, as in results.json.
        title: The title, which describes the link.
    """
    figure, (by_step, by_time, times) = pyplot.subplots(1, 3, figsize=(12, 3.6), layout="constrained")
    figure.suptitle(title)
    for mode, figures in modes.items():
        losses = smoothed(figures["losses_nats_per_byte"])
        at = range(len(figures["losses_nats_per_byte"]) - len(losses), len(figures["losses_nats_per_byte"]))
        step_time = figures["median_step_seconds"]
        by_step.plot(at, losses, color=color_of(mode), linewidth=1.2, label=mode)
        by_time.plot([step * step_time for step in at], losses, color=color_of(mode), linewidth=1.2)
    by_step.set_xlabel("step")
    by_step.set_ylabel(f"loss, nats per byte, mean of {SMOOTHED}")
    by_step.legend(frameon=False)
    by_time.set_xlabel("seconds: steps times the median step")
    names = [*modes]
    times.bar(names, [modes[mode]["median_step_seconds"] for mode in names], color=[color_of(mode) for mode in names])
    for place, mode in enumerate(names):
        if (expected := modes[mode]["predicted_step_seconds"]) is not None:
            label = "predicted" if place == 0 else None
            times.plot([place - 0.4, place + 0.4], [expected, expected], color="black", linewidth=1.5, label=label)
    times.set_ylabel("median step, seconds")
    if any(modes[mode]["predicted_step_seconds"] is not None for mode in names):
        times.legend(frameon=False)
    for axes in (by_step, by_time, times):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=110)


def draw_beside(path: Path, runs: dict[str, dict[str, Any]]) -> None:
    """Draws the mean step times of several runs with the same modes.

    Args:
        path: The picture.
        runs: By name, the results of each mode, as in results.json.
    """
    figure, axes = pyplot.subplots(figsize=(6, 3.2), layout="constrained")
    modes = [*next(iter(runs.values()))]
    width = 0.8 / len(runs)
    for place, (name, results) in enumerate(runs.items()):
        at = [mode + (place - (len(runs) - 1) / 2) * width for mode in range(len(modes))]
        heights = [results[mode]["mean_step_seconds"] for mode in modes]
        bars = axes.bar(at, heights, width * 0.95, label=name)
        axes.bar_label(bars, fmt="%.2f", fontsize=8)
    axes.set_xticks(range(len(modes)), modes)
    axes.set_ylabel("mean step, seconds")
    axes.margins(y=0.25)
    axes.legend(frameon=False, loc="upper right", ncols=len(runs))
    axes.grid(axis="y", alpha=0.3)
    figure.savefig(path, dpi=110)


def color_of(mode: str) -> str:
    return COLORS[predict.mode_of(mode).name]


def smoothed(values: list[float]) -> list[float]:
    window = min(SMOOTHED, len(values))
    return [statistics.mean(values[end - window : end]) for end in range(window, len(values) + 1)]


if __name__ == "__main__":
    named = [argument.split("=", 1) for argument in sys.argv[2:]]
    if not named or any(len(name) != 2 for name in named):
        sys.exit("usage: draw.py PICTURE NAME=results.json ...")
    draw_beside(Path(sys.argv[1]), {name: json.loads(Path(file).read_text())["modes"] for name, file in named})
