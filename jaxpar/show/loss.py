"""How did a run's loss fall? One picture from its metrics."""

import os
from pathlib import Path

import numpy as np

from jaxpar.show.plotting import MUTED, check_path, new_figure, save
from jaxpar.training.goodput import read_account
from jaxpar.training.metrics import read_metrics


def draw_loss(
    folder: str | os.PathLike[str], path: str | os.PathLike[str] | None = None
) -> Path:
    """Draw the training and the held-out loss of a run.

    Args:
      folder: the run's.
      path: the picture, .png, .svg or .pdf; None for ``loss.png`` in `folder`.

    Returns:
      The path.

    Raises:
      ModuleNotFoundError: if matplotlib is missing.
      FileNotFoundError: if the run has no metrics, or `path` no folder.
      ValueError: if `path` has another suffix.
    """
    folder = Path(folder)
    path = folder / "loss.png" if path is None else Path(path)
    check_path(path)
    records = read_metrics(folder / "metrics.jsonl")
    if not records:
        raise FileNotFoundError(f"{str(folder)!r} has no metrics.jsonl with a step")
    with new_figure(7.0, 3.2) as figure:
        axes = figure.subplots()
        for name, label, style in (
            ("train/loss", "training", {"linewidth": 1.0, "color": "#86add2"}),
            ("eval/loss", "held-out", {"marker": "o", "color": "#b3261e"}),
        ):
            rows = [(each["step"], each[name]) for each in records if name in each]
            if rows:
                steps, losses = np.array(rows).T
                axes.plot(steps, losses, label=f"{label} {losses[-1]:.3f}", **style)
        resumed = {each["resumed"] for each in read_account(folder)} - {None, 0}
        for number, step in enumerate(sorted(resumed)):
            label = None if number else "reopened"
            axes.axvline(step, color=MUTED, linestyle=":", linewidth=1.0, label=label)
        axes.set(xlabel="step", ylabel="loss", title=folder.resolve().name)
        axes.grid(alpha=0.3)
        axes.legend()
        save(figure, path, path.suffix.removeprefix("."))
    return path
