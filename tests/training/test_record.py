"""What does run.json say, at the first start and after changes?"""

import dataclasses
import json
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxpar
from jaxpar.config import preset
from jaxpar.optim import WithReduction
from jaxpar.training.loop import train
from jaxpar.training.opening import open_run
from jaxpar.training.options import StartOptions
from jaxpar.training.record import (
    as_json,
    changes_numbers,
    differences,
    first_record,
    later_record,
    read,
    refused,
    resolved,
    with_todays_fields,
    write,
)
from tests.optim.int8_reduction import Int8Reduction
from tests.runs import RULES, Data, bits, fresh, losses, make_engine


@dataclasses.dataclass(frozen=True)
class Config:
    steps: int = 6
    schedule_steps: int | None = None
    mesh: str = "data 4 x tensor 2"
    zero: int = 2
    accumulate: int = 2
    save_every: int = 6
    rate: float = 3e-3


def test_change_is_a_line_of_the_history_and_the_settings_are_the_last():
    wanted = as_json(Config(), {"corpus": "abc"})
    first = first_record(wanted)
    assert first["command"] == sys.argv
    assert "history" not in first
    now = as_json(Config(steps=9, zero=3), {"corpus": "abc"})
    changed = differences(first, now)
    assert changed == {"steps": [6, 9], "zero": [2, 3]}
    later = later_record(first, now, changed, 6)
    assert later["config"]["steps"] == 9
    assert later["commit"] == first["commit"]
    (line,) = later["history"]
    assert (line["step"], line["changed"]) == (6, changed)
    assert line.keys() == {"step", "time", "changed", "versions", "command", "commit"}
    again = later_record(later, as_json(Config(), {"corpus": "abc"}), {"zero": [3]}, 9)
    assert [each["step"] for each in again["history"]] == [6, 9]
    assert later_record(first, now, {}, 6) == first


def test_what_makes_another_run_is_named():
    changed = {"zero": [2, 3], "rate": [0.1, 0.2]}
    assert refused(changed, {"zero"}) == ["rate is 0.1 there, 0.2 here"]


@pytest.mark.parametrize(
    ("first", "now", "right"),
    [
        (None, Config(), 6),
        (None, Config(schedule_steps=9), 9),
        (Config(schedule_steps=6), Config(steps=12), 6),
        (Config(schedule_steps=6), Config(schedule_steps=12), 12),
        # A run from before the field was there.
        (Config(schedule_steps=None, steps=4), Config(steps=12), 4),
    ],
)
def test_what_is_fixed_is_taken_from_the_first_start(first, now, right):
    found = None if first is None else as_json(first, {})
    given = resolved(as_json(now, {}), found, {"schedule_steps": "steps"})
    assert given["config"]["schedule_steps"] == right


def test_setting_within_a_setting_is_named():
    changed = {"model": [{"width": 8, "bias": True}, {"width": 16, "bias": True}]}
    assert refused(changed, set()) == ["model.width is 8 there, 16 here"]


@dataclasses.dataclass(frozen=True)
class Shape:
    width: int = 8
    depth: int = 2


@dataclasses.dataclass(frozen=True)
class Later(StartOptions):
    model: Shape = preset({"a": Shape(), "b": Shape(16)}, "a")
    rate: float = 0.1
    extra: int = 5


@pytest.mark.parametrize(
    "found",
    [
        {"model": "b", "rate": 0.1, "tensorboard": True},
        {"model": {"width": 16}, "rate": 0.1},
        {"model": {"width": 16, "depth": 2}, "rate": 0.1, "extra": 5},
    ],
)
def test_record_of_an_older_recipe_is_of_the_same_run(found):
    """Presets were names, and there were fewer fields."""
    now = Later(model=Shape(16), change=True, writers=("mlflow",))
    wanted = as_json(now, {})
    assert wanted["config"].keys() == {"model", "rate", "extra"}
    there = with_todays_fields({"config": found, "identity": {}}, now)
    assert differences(there, wanted) == {}


@dataclasses.dataclass(frozen=True)
class Slow:
    kind: str = dataclasses.field(default="slow", init=False)
    decay: float = 0.1


@dataclasses.dataclass(frozen=True)
class Fast:
    kind: str = dataclasses.field(default="fast", init=False)
    bits: int = 32
    sizes: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class WithRule:
    rule: Slow | Fast = preset({"slow": Slow(), "fast": Fast()}, "slow")
    sizes: tuple[int, ...] = (1, 2)
    names: dict[str, int] = dataclasses.field(default_factory=dict)


def test_fields_of_another_kind_are_not_added_to_a_record():
    found = {"rule": {"kind": "slow", "decay": 0.5}}
    now = WithRule(rule=Fast())
    there = with_todays_fields({"config": found, "identity": {}}, now)
    assert there["config"]["rule"] == found["rule"]


def test_added_fields_are_as_json_has_them():
    """A tuple is a list there; a run does not differ from itself by that."""
    now = WithRule(rule=Fast())
    for found in ({"rule": "fast"}, {"rule": {"kind": "fast", "bits": 32}}):
        there = with_todays_fields({"config": found, "identity": {}}, now)
        assert differences(there, as_json(now, {})) == {}


def test_number_changes_are_told_from_those_of_rounding():
    assert changes_numbers({"changed": {"zero": [1, 2], "rate": [1, 2]}})
    assert not changes_numbers({"changed": {"zero": [1, 2], "mesh": [1, 2]}})


def test_record_is_replaced_whole(tmp_path):
    assert read(tmp_path) is None
    write(tmp_path, {"config": {}})
    assert read(tmp_path) == {"config": {}}
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


def go(config: Config, engine: jaxpar.Engine, folder: Path) -> None:
    run = open_run(folder, config, {})
    assert run.config.schedule_steps == 6
    options = {"steps": config.steps, "save_every": config.save_every}
    train(engine, Data(), run, recovery=RULES, **options)


def test_finished_run_goes_on_longer_on_another_mesh_and_stage(tmp_path):
    """With dropout and shuffled data: the numbers of a run that was longer at once."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(
        fresh(),
        Data(),
        open_run(whole, Config(), {}),
        steps=12,
        save_every=6,
        recovery=RULES,
    )
    go(Config(), fresh(), parts)
    shape = jaxpar.make_mesh(jaxpar.MeshShape(data=2))
    other = Config(steps=12, mesh="data 2", zero=3, save_every=4)
    go(other, make_engine(mesh=shape, zero=3), parts)
    assert losses(parts) == pytest.approx(losses(whole), rel=1e-5)
    (line,) = read(parts)["history"]
    assert line["step"] == 6
    assert line["changed"] == {
        "mesh": ["data 4 x tensor 2", "data 2"],
        "save_every": [6, 4],
        "steps": [6, 12],
        "zero": [2, 3],
    }
    assert read(parts)["config"]["steps"] == 12
    go(other, make_engine(mesh=shape, zero=3), parts)
    assert len(read(parts)["history"]) == 1, "nothing has changed since"


def test_micro_batches_of_a_loss_that_draws_may_not_change(tmp_path):
    engine = fresh()
    go(Config(), engine, tmp_path)
    before, state = (tmp_path / "run.json").read_bytes(), bits(engine)
    message = (
        r"^accumulate was 2 and is 1, which changes this run's numbers: every "
        r"micro-batch draws random numbers of its own\. Give the former one, "
        "choose another"
    )
    with pytest.raises(ValueError, match=message):
        go(Config(accumulate=1, steps=8), make_engine(accumulate=1), tmp_path)
    assert (tmp_path / "run.json").read_bytes() == before
    assert bits(engine) == state


def test_engine_says_which_settings_change_its_numbers():
    assert set(fresh().spec.changes_with) == {"accumulate"}


def test_coupled_and_reduced_runs_say_what_they_depend_on():
    def engine(**options):
        return jaxpar.initialize(
            model=lambda rngs: nnx.Linear(4, 4, rngs=rngs),
            loss_fn=lambda model, batch: jnp.mean(model(batch["x"]) ** 2),
            sample_batch={"x": np.ones((8, 4), np.float32)},
            **{"optimizer": optax.sgd(0.1), **options},
        )

    assert engine().spec.changes_with == {}
    assert set(engine(coupled_batch=True).spec.changes_with) == {"accumulate"}
    reduced = engine(optimizer=WithReduction(optax.sgd(0.1), Int8Reduction()))
    assert reduced.spec.changes_with == {
        "mesh": "every data shard keeps its own reduction"
    }


def test_record_is_json_that_people_read(tmp_path):
    open_run(tmp_path, Config(), {})
    text = (tmp_path / "run.json").read_text()
    assert text == json.dumps(json.loads(text), indent=2) + "\n"


def test_steps_beyond_the_schedule_are_said(tmp_path, capsys):
    assert open_run(tmp_path, Config(), {}).config.schedule_steps == 6
    (tmp_path / "metrics.jsonl").touch()
    assert capsys.readouterr().out == ""
    assert open_run(tmp_path, Config(steps=9), {}).config.schedule_steps == 6
    assert capsys.readouterr().out == (
        "steps 9, schedule_steps 6 since the first start: beyond them the last "
        "learning rate is held\n"
    )
    with pytest.raises(ValueError, match="schedule_steps is 6 there, 9 here"):
        open_run(tmp_path, Config(schedule_steps=9), {})
