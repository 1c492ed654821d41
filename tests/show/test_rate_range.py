"""Does the picture of a range test show the run's losses and the range?"""

import json
from pathlib import Path

import numpy as np
import pytest

from jaxpar.show import rate_range
from jaxpar.show.rate_range import draw_rate_range, show_rate_range
from jaxpar.training.rate_range import find_rate_range, smoothed

RATES = np.linspace(0.1, 2.0, 60)
LOSSES = np.interp(RATES, [0.5, 1.5, 2.0], [4.0, 1.0, 7.0])


def write(folder: Path, losses: np.ndarray, **more: float) -> None:
    rows = [
        {"step": step, "time": 0.0, "train/learning_rate": rate, "train/loss": loss}
        for step, (rate, loss) in enumerate(zip(RATES, losses, strict=True), start=1)
    ]
    rows[5] |= {"eval/loss": 3.0}
    lines = json.dumps({"step": 0, "time": 0.0, "eval/loss": 4.0})
    lines += "\n" + "\n".join(map(json.dumps, rows)).replace("NaN", '"nan"') + "\n"
    (folder / "metrics.jsonl").write_text(lines)


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list:
    """The figures that are saved."""
    figures, save = [], rate_range.save
    monkeypatch.setattr(
        rate_range, "save", lambda *args: (figures.append(args[0]), save(*args))
    )
    return figures


def test_picture_has_the_losses_and_the_range(tmp_path: Path, drawn: list) -> None:
    losses = np.append(LOSSES[:-2], [np.nan, np.nan])
    write(tmp_path, losses)
    assert draw_rate_range(tmp_path) == tmp_path / "lr_range.png"
    assert (tmp_path / "lr_range.png").read_bytes().startswith(b"\x89PNG")
    (axes,) = drawn[0].axes
    training, smooth = axes.get_lines()
    np.testing.assert_array_equal(training.get_xdata(), RATES)
    np.testing.assert_array_equal(training.get_ydata(), losses)
    np.testing.assert_array_equal(smooth.get_ydata(), smoothed(losses[:-2]))
    found = find_rate_range(RATES, losses)
    (span,) = axes.patches
    assert (span.get_x(), span.get_x() + span.get_width()) == (found.low, found.high)
    assert axes.get_xscale() == "log"
    ticks = [each.get_text() for each in axes.get_xticklabels()]
    assert {"0.1", "1"} <= set(ticks), "and no formulas"


def test_suggestion_is_printed_with_its_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    write(tmp_path, LOSSES)
    found = show_rate_range(tmp_path)
    assert found == find_rate_range(RATES, LOSSES)
    printed = capsys.readouterr().out
    words = f"range    learning rates from {found.low:.2g} to {found.high:.2g}\npicture"
    assert printed.startswith(words)
    assert str(tmp_path / "lr_range.png") in printed


def test_test_that_ended_too_early_and_one_without_matplotlib_say_so(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(*_: object) -> None:
        raise ModuleNotFoundError("install matplotlib")

    monkeypatch.setattr(rate_range, "draw_rate_range", missing)
    write(tmp_path, np.linspace(4.0, 1.0, 60))
    show_rate_range(tmp_path)
    printed = capsys.readouterr().out
    assert "to 2, where the test ended: the loss had not risen\n" in printed
    assert "picture  none: install matplotlib" in printed


def test_run_without_rates_is_refused(tmp_path: Path) -> None:
    row = json.dumps({"step": 1, "time": 0.0, "train/loss": 4.0})
    (tmp_path / "metrics.jsonl").write_text(row + "\n")
    with pytest.raises(ValueError, match=r"its metrics have no train/learning_rate"):
        draw_rate_range(tmp_path)
