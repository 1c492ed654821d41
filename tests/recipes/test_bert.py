"""Does the recipe of a BERT run, move to another mesh, resume and refuse?"""

import dataclasses
import re
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxpar.data import Tokens
from recipes import bert
from tests.recipes.programs import logged_steps, small_run, start, told

RECIPE = "recipes/bert.py"
STEPS = 8
SMALL = ("--model.num-layers", "2", "--model.width", "64", "--model.seq-len", "64")


@pytest.mark.slow
def test_recipe_trains_moves_resumes_and_refuses(tmp_path: Path) -> None:
    args = [*small_run(tmp_path, STEPS), *SMALL, "--batch-size", "4"]
    first = start(RECIPE, *args, "--save-every", "3")
    assert first.code == 0, first.text
    before, trained = first.heldout("at step 0"), first.heldout(f"at step {STEPS}")
    assert trained < before - 0.5
    assert "(ZeRO 3 on data 2 x tensor 2)" in first.text
    moved = re.findall(r"held-out (\S+) at step 6\n", first.text)
    assert len(moved) == 2, "at the end of the first mesh, and reopened on the second"
    assert float(moved[0]) == pytest.approx(float(moved[1]), rel=2e-6)
    said = re.search(r"held-out (\S+)% of (\d+) masked words are right", first.text)
    assert said is not None
    assert int(said[2]) == 4 * round(0.15 * 64)

    second = start(RECIPE, *args)
    assert second.code == 0, second.text
    assert second.heldout(f"at step {STEPS}") == trained, "restored, then evaluated"
    assert said[0] in second.text, "the same masks"

    third = start(RECIPE, *args, "--learning-rate", "0.5")
    assert third.code != 0
    assert "learning_rate is " in third.text
    assert logged_steps(tmp_path / "run") == list(range(1, STEPS + 1))


def test_rows_and_the_engine_have_the_same_shapes() -> None:
    ids = np.arange(2000) % 250
    text = Tokens((ids.astype(np.uint8),), files=("counting",))
    config = bert.Config(model=dataclasses.replace(bert.SMALL, vocab_size=257))
    batch = bert.masked(config, text).read(range(config.batch_size))
    assert {name: x.shape for name, x in batch.items()} == {
        name: x.shape for name, x in bert.sample_batch(config).items()
    }
    assert batch["tokens"].max() == 256, "the last word is the mask"
    assert jax.tree.leaves(batch)[0].dtype == np.int32


def test_help_names_its_flags(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    ended = told(monkeypatch, capsys, RECIPE, "--help")
    assert ended.code == 0
    for text in ("--model.seq-len", "mask token", "--schedule", "The run's folder"):
        assert text in ended.text
    assert "--model.task" not in ended.text
