"""Does one step of a run follow another in order? Most is in test_loop.py."""

from pathlib import Path

import pytest

from jaxpar.training.loop import train
from jaxpar.training.metrics import read_metrics
from tests.runs import RULES, Data, fresh, run_in


def test_error_of_a_hook_is_the_users_and_is_not_hidden(tmp_path: Path) -> None:
    def hook(step: int, metrics: dict, engine: object) -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        train(
            fresh(),
            Data(),
            run_in(tmp_path),
            steps=2,
            save_every=2,
            hooks=[hook],
            recovery=RULES,
        )
    assert [r["step"] for r in read_metrics(tmp_path / "metrics.jsonl")] == [1]
