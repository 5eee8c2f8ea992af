"""The course of a training as a picture."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any


def plot_training(history: Sequence[Mapping[str, Any]], file: str | Path | IO[bytes]) -> None:
    """Loss, accuracy per drafted position and estimated τ over the steps (held-out values as dots) into a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    places = {"left": 0.04, "right": 0.99, "bottom": 0.13, "top": 0.91, "wspace": 0.14}  # matplotlib's own layouts draw it twice
    figure, axes = plt.subplots(1, 3, figsize=(13, 3.8), gridspec_kw=places)
    positions = sorted({int(k.rsplit("_", 1)[1]) for log in history for k in log if k.startswith("accuracy_")})
    panels = [["loss"], [f"accuracy_{p}" for p in positions], ["tau"]]
    for axis, names, title in zip(axes, panels, ("loss", "accuracy per drafted position", "estimated τ (teacher-forced)"), strict=True):
        for i, name in enumerate(names):
            for prefix, style in (("", "-"), ("eval_", "o--")):
                points = [(log["step"], log[prefix + name]) for log in history if prefix + name in log]
                if points:
                    label = name.replace("accuracy_", "position ") + (" (held out)" if prefix else "")
                    axis.plot(*zip(*points, strict=True), style, color=f"C{i}", label=label, markersize=4, alpha=0.9 if not prefix else 0.7)
        axis.set(title=title, xlabel="step")
        axis.grid(alpha=0.3)
        if axis.lines:
            axis.legend(fontsize=7)
    figure.savefig(file, dpi=110)
    plt.close(figure)
