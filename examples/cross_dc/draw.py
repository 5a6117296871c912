"""Draws the losses and step times of all modes."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import matplotlib

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
        title: What the link is.
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


def color_of(mode: str) -> str:
    return COLORS[mode.partition("@")[0]]


def smoothed(values: list[float]) -> list[float]:
    window = min(SMOOTHED, len(values))
    return [statistics.mean(values[end - window : end]) for end in range(window, len(values) + 1)]
