"""Does a run go on with other settings as was asked, and with nothing else changed?"""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest

import jaxpar
from jaxpar.optim import OPTIMIZERS
from jaxpar.training.changes import leaves_anew
from jaxpar.training.record import read
from jaxpar.tree import named_leaves
from tests.runs import events
from tests.training.changing import Config, go, stream

CHANGED = Config(steps=4, change=True)


def rows(given: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(given)


def test_settings_that_change_numbers_are_refused_without_the_flag(tmp_path: Path):
    go(tmp_path, Config())
    before = (tmp_path / "run.json").read_bytes()
    with pytest.raises(ValueError, match=r"rate is 0\.1 there, 0\.2 here.*--change"):
        go(tmp_path, Config(steps=4, rate=0.2))
    assert (tmp_path / "run.json").read_bytes() == before


def test_other_batch_goes_on_at_its_row(tmp_path: Path):
    """No row again, none left out, but those that a rollback had left out."""
    _, first = go(tmp_path, Config())
    run = jaxpar.open_run(tmp_path, Config(), {"corpus": 0})
    run.note("rolled back", 3, left_out=[4], rows_left_out=[[32, 40]])
    del run
    _, then = go(tmp_path, dataclasses.replace(CHANGED, steps=6, batch_size=6))
    found = rows([*first.given[:3], *then.given[:3]])
    expected = stream(50)
    kept = [i for i in range(50) if not 32 <= i < 40]
    np.testing.assert_array_equal(found, expected[kept])
    (line,) = read(tmp_path)["history"]
    assert line["changed"]["batch_size"] == [8, 6]
    assert then.rows == 50
    # Without the flag, it goes on from here.
    _, last = go(tmp_path, Config(steps=7, batch_size=6))
    np.testing.assert_array_equal(last.given[0], stream(56)[50:])


def test_change_that_was_not_saved_yet_is_no_other_run(tmp_path: Path):
    """Killed between the change and its first checkpoint."""
    go(tmp_path, Config())
    go(tmp_path, Config(steps=3, batch_size=6, rate=0.2, change=True))
    _, then = go(tmp_path, Config(steps=4, batch_size=6, rate=0.2))
    np.testing.assert_array_equal(then.given[0], stream(30)[24:])


def test_other_corpus_begins_at_its_first_row(tmp_path: Path):
    go(tmp_path, Config())
    run = jaxpar.open_run(tmp_path, Config(), {"corpus": 0})
    run.note("rolled back", 3, left_out=[0], rows_left_out=[[0, 8]])
    del run
    _, then = go(tmp_path, dataclasses.replace(CHANGED, corpus=1))
    np.testing.assert_array_equal(then.given[0], stream(8, corpus=1))
    assert [e["rows_before"] for e in events(tmp_path, "new data")] == [24]


RATES: dict[str, Any] = {
    "plain": optax.sgd,
    "scheduled": lambda r: optax.sgd(optax.linear_schedule(r, 0.0, 100)),
    "injected": optax.inject_hyperparams(optax.sgd),
    "injected schedule": lambda r: optax.inject_hyperparams(optax.sgd)(
        optax.linear_schedule(r, 0.0, 100)
    ),
}


@pytest.mark.parametrize("kind", RATES)
def test_other_rate_takes_effect_at_the_next_step(kind: str, tmp_path: Path):
    """A step of gradient descent is twice as long, where the schedule stood."""

    def params(engine: Any) -> dict[str, np.ndarray]:
        return {k: np.asarray(x) for k, x in named_leaves(engine.state.params).items()}

    ends = {}
    for rate in (0.1, 0.2):
        folder = tmp_path / f"{rate}"
        before = params(go(folder, Config(), RATES[kind](0.1))[0])
        config = Config(steps=4, rate=rate, change=True)
        engine, _ = go(folder, config, RATES[kind](rate))
        after = params(engine)
        ends[rate] = {name: after[name] - before[name] for name in after}
    for name, step in ends[0.1].items():
        assert np.abs(step).max() > 1e-4
        np.testing.assert_allclose(ends[0.2][name], 2 * step, rtol=1e-3, atol=1e-7)


def test_other_optimizer_begins_anew_and_says_so(tmp_path: Path, capsys: Any):
    schedule = functools.partial(optax.linear_schedule, end_value=0, transition_steps=9)
    adamw, lion = OPTIMIZERS["adamw"], OPTIMIZERS["lion"]
    go(tmp_path, Config(optimizer=adamw), adamw.make(schedule(0.1)))
    capsys.readouterr()
    config = Config(optimizer=lion, change=True)  # No step yet: 3 are done.
    engine, _ = go(tmp_path, config, lion.make(schedule(0.1)))
    state = named_leaves(engine.state.opt_state)
    moments = [x for name, x in state.items() if "/mu/" in name]
    assert moments
    assert not any(np.abs(x).max() for x in moments)
    assert int(state["count"]) == 3, "the schedule goes on"
    assert int(state["inner_state/0/count"]) == 0
    said = capsys.readouterr().out
    assert "optimizer state that begins anew: opt_state/" in said
    (event,) = events(tmp_path, "optimizer began anew")
    assert "opt_state/inner_state/0/mu/out/kernel" in event["leaves"]
    assert "opt_state/count" not in event["leaves"]
    before = jax.tree.map(np.asarray, engine.state.params)
    engine, _ = go(tmp_path, Config(steps=4, optimizer=lion), lion.make(schedule(0.1)))
    rate = 0.1 * (1 - 3 / 9)
    assert float(engine.state.opt_state.hyperparams["learning_rate"]) == pytest.approx(
        rate
    )
    for name, new in named_leaves(engine.state.params).items():
        old = named_leaves(before)[name]
        step = np.abs(np.asarray(new) * 1.0 - old * (1 - rate * lion.weight_decay))
        np.testing.assert_allclose(step[step > 1e-6], rate, rtol=1e-4)


def test_same_leaves_of_another_kind_begin_anew_too():
    """LAMB's moments have the names and shapes of AdamW's."""
    own = {"opt_state/0/count": 1, "opt_state/0/mu/w": 2, "params/w": 3}
    assert leaves_anew(own, own, new_optimizer=False) == []
    anew = ["opt_state/0/count", "opt_state/0/mu/w"]
    assert leaves_anew(own, own, new_optimizer=True) == anew
    assert leaves_anew({"params/w": 3}, own, new_optimizer=False) == anew
