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
from jaxpar.checkpoint.folder import step_path
from jaxpar.optim import OPTIMIZERS
from jaxpar.training.changes import leaves_to_reset
from jaxpar.training.evaluations import Evaluations
from jaxpar.training.record import read
from jaxpar.training.run import RunRules
from jaxpar.training.run_loop import RunLoop
from jaxpar.tree import named_leaves
from tests.runs import RULES, events
from tests.training.changing import (
    LENGTH,
    Config,
    Recorded,
    go,
    make_engine,
    stream,
    tokens,
)

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
    assert leaves_to_reset(own, own, new_optimizer=False) == ([], {})
    anew = ["opt_state/0/count", "opt_state/0/mu/w"]
    assert leaves_to_reset(own, own, new_optimizer=True) == (anew, {})
    assert leaves_to_reset({"params/w": 3}, own, new_optimizer=False) == (anew, {})


def test_schedule_goes_on_under_another_name():
    """Of a chain with another part, and of a rate that was injected since."""
    chain = {"opt_state/1/count": 1, "opt_state/0/mu/w": 2}
    longer = {"opt_state/2/count": 1, "opt_state/0/mu/w": 2, "opt_state/0/nu/w": 2}
    found = leaves_to_reset(chain, longer, new_optimizer=False)
    assert found[1] == {"opt_state/2/count": "opt_state/1/count"}
    assert "opt_state/2/count" not in found[0]
    injected = {
        "opt_state/count": 1,
        "opt_state/hyperparams/learning_rate": 1,
        "opt_state/hyperparams_states/learning_rate/count": 1,
        "opt_state/inner_state/0/mu/w": 2,
    }
    _, renamed = leaves_to_reset(chain, injected, new_optimizer=False)
    read_at = "opt_state/hyperparams_states/learning_rate/count"
    assert renamed[read_at] == "opt_state/1/count"


def test_optimizer_with_a_schedule_of_its_own_goes_on_at_its_step(
    tmp_path: Path, capsys: Any
):
    """The count of AdamW's chain is another leaf than that of momentum's."""
    rate = optax.linear_schedule(0.1, 0.0, 100)
    go(tmp_path, Config(), optax.chain(optax.scale_by_adam(), scaled(rate)))
    config = Config(optimizer=OPTIMIZERS["lion"], change=True)
    longer = optax.chain(optax.add_decayed_weights(0.0), optax.trace(0.9), scaled(rate))
    engine, _ = go(tmp_path, config, longer)
    assert int(named_leaves(engine.state.opt_state)["2/count"]) == 3
    capsys.readouterr()
    engine, _ = go(tmp_path / "plain", Config(), optax.sgd(0.1))
    engine, _ = go(tmp_path / "plain", config, longer)
    assert int(named_leaves(engine.state.opt_state)["2/count"]) == 0
    assert "the optimizer's schedule begins again at step 0" in capsys.readouterr().out


def scaled(rate: Any) -> Any:
    return optax.scale_by_learning_rate(rate)


def test_optimizer_that_was_left_and_taken_again_goes_on(tmp_path: Path, capsys: Any):
    """No step was made with the other one."""
    adamw, lamb = OPTIMIZERS["adamw"], OPTIMIZERS["lamb"]
    go(tmp_path, Config(optimizer=adamw))
    run = jaxpar.open_run(tmp_path, Config(optimizer=lamb, change=True), {"corpus": 0})
    run.accept(make_engine(run.config))
    del run
    capsys.readouterr()
    engine, _ = go(tmp_path, Config(optimizer=adamw, change=True))
    assert "begins anew" not in capsys.readouterr().out
    moments = named_leaves(engine.state.opt_state)
    assert any(np.abs(x).max() > 0 for name, x in moments.items() if "/mu/" in name)


def test_damaged_checkpoint_is_passed_over_with_its_changes(tmp_path: Path):
    """What has changed is counted from the checkpoint that is restored."""
    options = {"rate": 0.1, "optimizer": OPTIMIZERS["adamw"]}
    go(tmp_path, Config(steps=2, **options))
    changed = options | {"optimizer": OPTIMIZERS["lion"]}
    go(tmp_path, Config(steps=4, change=True, **changed))
    newest = step_path(tmp_path / "checkpoints", 4)
    largest = max(newest.rglob("*"), key=lambda path: path.stat().st_size)
    largest.write_bytes(b"no")
    with (
        pytest.warns(UserWarning, match="skipped"),
        pytest.warns(UserWarning, match="were renamed to end in '.damaged'"),
    ):
        engine, _ = go(tmp_path, Config(steps=5, **changed))
    assert engine.steps == 5
    assert len(events(tmp_path, "optimizer began anew")) == 2


def test_second_rollback_in_another_corpus_leaves_both_out(tmp_path: Path):
    """The first one must not be forgotten as if the corpus had changed again."""
    go(tmp_path, Config())
    config = dataclasses.replace(CHANGED, corpus=1)
    run = jaxpar.open_run(tmp_path, config, {"corpus": 1})
    data = Recorded(tokens(1), batch_size=8, seq_len=LENGTH, seed=3)
    engine = make_engine(run.config)
    rules = RunRules(4, 100, None, RULES, (), None)
    loop = RunLoop(engine, data, run, rules, Evaluations(None, None), None)
    run.accept(engine)
    loop.begin()
    loop.left_out = [(0, 8)]
    run.note("rolled back", 3, rows_left_out=[[0, 8]])
    run.resume(engine, data)
    loop._resume_at(3)
    assert loop.left_out == [(0, 8)]
    assert len(events(tmp_path, "new data")) == 1
    np.testing.assert_array_equal(next(data)["tokens"], stream(16, corpus=1)[8:])
