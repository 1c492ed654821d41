"""Which learning rates does a range test suggest? One line, and a picture."""

import os
from pathlib import Path

import numpy as np

from jaxpar.show.plotting import check_path, new_figure, save
from jaxpar.training.metrics import read_metrics
from jaxpar.training.rate_range import RateRange, find_rate_range, smoothed

_RATE, _LOSS = "train/learning_rate", "train/loss"


def draw_rate_range(
    folder: str | os.PathLike[str], path: str | os.PathLike[str] | None = None
) -> Path:
    """Draw the loss of a range test over the learning rate, with the suggested range.

    Args:
      folder: the run's.
      path: the picture, .png, .svg or .pdf; None for ``lr_range.png`` in `folder`.

    Returns:
      The path.

    Raises:
      ModuleNotFoundError: if matplotlib is missing.
      FileNotFoundError: if the run has no metrics, or `path` no folder.
      ValueError: if `path` has another suffix, the run's metrics have no learning rate,
        or they show no range; see `find_rate_range`.
    """
    folder = Path(folder)
    path = folder / "lr_range.png" if path is None else Path(path)
    check_path(path)
    rates, losses = _read(folder)
    found = find_rate_range(rates, losses)
    finite = np.isfinite(losses)
    with new_figure(7.0, 3.2) as figure:
        axes = figure.subplots()
        axes.plot(rates, losses, color="#86add2", linewidth=1.0, label="training")
        smooth = smoothed(losses[finite])
        axes.plot(rates[finite], smooth, color="#b3261e", label="smoothed")
        label = _text(found)
        axes.axvspan(found.low, found.high, color="#b3261e", alpha=0.1, label=label)
        # What is far above the beginning is drawn at the upper edge, or beyond it.
        top = smooth[0] + 0.5 * (smooth[0] - smooth.min())
        axes.set_ylim(top=max(top, losses[finite][0]))
        axes.set(xscale="log", xlabel="learning rate", ylabel="loss")
        axes.xaxis.set_major_formatter(lambda rate, _: f"{rate:g}")
        axes.xaxis.set_minor_formatter("")
        axes.set_title(folder.resolve().name)
        axes.grid(alpha=0.3)
        axes.legend()
        save(figure, path, path.suffix.removeprefix("."))
    return path


def show_rate_range(folder: str | os.PathLike[str]) -> RateRange:
    """Print the range that a test suggests, and draw it if matplotlib is there.

    Args:
      folder: the run's; its metrics have the learning rate.

    Returns:
      The range.

    Raises:
      FileNotFoundError: if the run has no metrics.
      ValueError: if they have no learning rate or show no range; see `find_rate_range`.
    """
    found = find_rate_range(*_read(Path(folder)))
    print(f"range    {_text(found)}")
    try:
        print(f"picture  {draw_rate_range(folder).resolve()}")
    except ModuleNotFoundError as error:
        print(f"picture  none: {error}")
    return found


def _read(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    records = read_metrics(folder / "metrics.jsonl")
    rows = [(x[_RATE], x[_LOSS]) for x in records if _RATE in x and _LOSS in x]
    if not rows:
        raise ValueError(
            f"folder={str(folder)!r}: its metrics have no {_RATE}; make the optimizer "
            "with optax.inject_hyperparams."
        )
    rates, losses = np.array(rows).T
    return rates, losses


def _text(found: RateRange) -> str:
    end = "" if found.has_risen else ", where the test ended: the loss had not risen"
    return f"learning rates from {found.low:.2g} to {found.high:.2g}{end}"
