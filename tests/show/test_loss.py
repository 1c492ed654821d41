"""Does the picture of a run show the numbers that the run logged?"""

import json
from pathlib import Path

import matplotlib.figure
import numpy as np
import pytest

from jaxpar.show.loss import draw_loss


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[matplotlib.figure.Figure]:
    """The figures that are saved."""
    figures = []
    save = matplotlib.figure.Figure.savefig
    monkeypatch.setattr(
        matplotlib.figure.Figure,
        "savefig",
        lambda self, *args, **options: (
            figures.append(self),
            save(self, *args, **options),
        ),
    )
    return figures


def write(folder: Path, *records: dict, resumed: tuple[int, ...] = ()) -> None:
    lines = [json.dumps({"time": 0.0, **record}) for record in records]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    known = {"began": 0.0, "ended": 1.0, "seconds": {}, "step": None, "marks": []}
    accounts = [{**known, "resumed": step} for step in resumed]
    (folder / "goodput.json").write_text(json.dumps(accounts))


def test_losses_and_reopenings_are_those_of_the_run(tmp_path, drawn):
    write(
        tmp_path,
        {"step": 1, "loss": 4.0},
        {"step": 2, "loss": "nan"},
        {"step": 3, "loss": 3.0, "heldout_loss": 3.5},
        {"step": 4, "loss": 2.0, "heldout_loss": 2.5},
        resumed=(0, 3),
    )
    assert draw_loss(tmp_path) == tmp_path / "loss.png"
    (figure,) = drawn
    (axes,) = figure.axes
    training, heldout, reopened = axes.get_lines()
    np.testing.assert_array_equal(training.get_xdata(), [1, 2, 3, 4])
    np.testing.assert_array_equal(training.get_ydata(), [4.0, np.nan, 3.0, 2.0])
    np.testing.assert_array_equal(heldout.get_xdata(), [3, 4])
    np.testing.assert_array_equal(heldout.get_ydata(), [3.5, 2.5])
    assert list(reopened.get_xdata()) == [3, 3]
    texts = [text.get_text() for text in axes.get_legend().get_texts()]
    assert texts == ["training 2.000", "held-out 2.500", "reopened"]
    assert axes.get_title() == tmp_path.name


def test_run_that_was_never_evaluated_is_drawn(tmp_path, drawn):
    write(tmp_path, {"step": 1, "loss": 4.0})
    path = draw_loss(tmp_path, tmp_path / "run.svg")
    assert path.read_text().startswith("<?xml")
    assert len(drawn[0].axes[0].get_lines()) == 1


def test_run_without_metrics_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"metrics\.jsonl"):
        draw_loss(tmp_path)
