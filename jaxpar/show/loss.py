"""How did a run's loss fall? One picture from its metrics."""

import os
from pathlib import Path

import numpy as np

from jaxpar.show.plotting import import_matplotlib
from jaxpar.training.goodput import read_account
from jaxpar.training.metrics import read_metrics

_DOTS_PER_INCH = 150


def draw_loss(
    folder: str | os.PathLike[str], path: str | os.PathLike[str] | None = None
) -> Path:
    """Draw the training and the held-out loss of a run.

    Args:
      folder: the run's.
      path: the picture, in a format of matplotlib; None for ``loss.png`` in `folder`.

    Returns:
      The path.

    Raises:
      ModuleNotFoundError: if matplotlib is missing.
      FileNotFoundError: if the run has no metrics.
    """
    figures = import_matplotlib()
    folder = Path(folder)
    path = folder / "loss.png" if path is None else Path(path)
    records = read_metrics(folder / "metrics.jsonl")
    figure = figures.Figure(figsize=(7.0, 3.2), layout="constrained")
    axes = figure.subplots()
    for name, label, style in (
        ("loss", "training", {"linewidth": 1.0, "color": "#86add2"}),
        ("heldout_loss", "held-out", {"marker": "o", "color": "#b3261e"}),
    ):
        rows = [(each["step"], each[name]) for each in records if name in each]
        if rows:
            steps, losses = np.array(rows).T
            axes.plot(steps, losses, label=f"{label} {losses[-1]:.3f}", **style)
    resumed = {each["resumed"] for each in read_account(folder)} - {None, 0}
    for number, step in enumerate(sorted(resumed)):
        label = None if number else "reopened"
        axes.axvline(step, color="#59636e", linestyle=":", linewidth=1.0, label=label)
    axes.set(xlabel="step", ylabel="loss", title=folder.resolve().name)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=_DOTS_PER_INCH)
    return path
