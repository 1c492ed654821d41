"""Does the command line say what it takes, and what a misspelt flag should be?"""

import dataclasses
import json
import sys
import types
from collections.abc import Sequence
from pathlib import Path

import pytest

from jaxpar import config as flags
from jaxpar.cli.recipe_flags import parse
from jaxpar.config import preset
from jaxpar.mesh import MeshShape
from jaxpar.planner.choices import KNOBS


@dataclasses.dataclass(frozen=True)
class Config:
    """One run."""

    steps: int = 10
    """Training steps."""
    mesh: MeshShape = MeshShape()  # noqa: RUF009 - frozen
    """Devices by axis."""
    clip_norm: float | None = None
    """Largest norm of the gradients."""


def test_flags_are_field_names():
    found = parse(
        Config, None, ["--mesh.data", "4", "--mesh.tensor", "2", "--clip-norm", "0.5"]
    )
    assert found == Config(mesh=MeshShape(data=4, tensor=2), clip_norm=0.5)


def test_defaults_are_those_of_the_class():
    assert parse(Config, None, []) == Config()


def test_arguments_are_the_processes_own_by_default(monkeypatch):
    monkeypatch.setattr("sys.argv", ["train.py", "--steps", "3"])
    assert parse(Config, None).steps == 3


def test_help_shows_description_docstrings_and_defaults(capsys):
    with pytest.raises(SystemExit) as stopped:
        parse(Config, "Train a thing.", ["--help"])
    assert stopped.value.code == 0
    shown = capsys.readouterr().out
    for text in ("Train a thing.", "Training steps.", "Largest norm", "--mesh.tensor"):
        assert text in shown
    assert "(default: 10)" in shown


@pytest.mark.parametrize(
    ("args", "near"),
    [
        (["--stesp", "3"], "--steps"),
        (["--mesh.tenser", "2"], "--mesh.tensor"),
        (["--clip_nrm", "1"], "--clip-norm"),
    ],
)
def test_misspelt_flag_is_answered_with_the_near_one(args, near, capsys):
    with pytest.raises(SystemExit) as stopped:
        parse(Config, None, args)
    assert stopped.value.code == 2
    captured = capsys.readouterr()
    shown = captured.out + captured.err
    assert args[0] in shown
    assert near in shown


def test_wrong_type_says_flag_and_type(capsys):
    with pytest.raises(SystemExit) as stopped:
        parse(Config, None, ["--steps", "many"])
    assert stopped.value.code == 2
    captured = capsys.readouterr()
    shown = captured.out + captured.err
    assert "--steps" in shown
    assert "many" in shown


@dataclasses.dataclass(frozen=True)
class Nested(Config):
    data: tuple[str, ...] = ("a",)
    tensorboard: bool = False
    out: str = "runs/x"
    mesh: MeshShape = MeshShape()  # noqa: RUF009 - frozen


WRITTEN = Nested(7, MeshShape(tensor=2), None, ("x y", "z"), True, "runs/a b")
AS_YAML = """
steps: 7
clip_norm: null
mesh: {tensor: 2}
data: [x y, z]
tensorboard: true
out: runs/a b
"""


@pytest.mark.parametrize("name", ["run.json", "flags.json", "flags.yaml"])
def test_flags_are_taken_from_a_file_and_others_win(name, tmp_path):
    own = dataclasses.asdict(WRITTEN)
    record = {"config": own, "identity": {"corpus": "abc"}, "command": []}
    file = tmp_path / name
    texts = {"run.json": json.dumps(record), "flags.json": json.dumps(own)}
    file.write_text(texts.get(name, AS_YAML))
    assert parse(Nested, None, ["--config", str(file)]) == WRITTEN
    beside = ["--mesh.data=4", f"--config={file}", "--steps", "9", "--no-tensorboard"]
    found = parse(Nested, None, [*beside, "--clip-norm", "0.5", "--data"])
    assert found == Nested(9, MeshShape(4, tensor=2), 0.5, (), False, "runs/a b")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("- a\n- b", "must have names and values, such as steps: 100"),
        ("a: [", "is not YAML"),
        ("stesp: 3", "--steps"),
        ("steps: many", "many"),
        (None, "No such file"),
    ],
)
def test_file_that_has_no_flags_is_named(text, said, tmp_path, capsys):
    file = tmp_path / "flags.yaml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(SystemExit) as stopped:
        parse(Nested, None, ["--config", str(file)])
    assert stopped.value.code == 2
    captured = capsys.readouterr()
    assert said in captured.out + captured.err


def test_mesh_auto_needs_a_target(capsys):
    with pytest.raises(SystemExit) as stopped:
        parse(Config, None, ["--mesh", "auto", "--steps", "3"])
    assert stopped.value.code == 2
    assert "--mesh auto needs --target" in capsys.readouterr().err


def test_help_tells_of_mesh_auto_where_there_is_a_mesh(capsys):
    with pytest.raises(SystemExit):
        parse(Config, "Trains.", ["--help"])
    assert "--mesh auto --target h200:1x8 picks the mesh" in " ".join(
        capsys.readouterr().out.replace("│", " ").split()
    )


def test_help_is_not_searched_for(capsys):
    with pytest.raises(SystemExit) as stopped:
        parse(Config, "Trains.", ["--mesh", "auto", "--target", "h200:8x8", "--help"])
    assert stopped.value.code == 0
    assert "--steps" in capsys.readouterr().out


def test_mesh_auto_is_of_files(capsys, monkeypatch):
    """What a notebook defines has no file to plan."""
    monkeypatch.setitem(sys.modules, "a_notebook", types.ModuleType("a_notebook"))
    defined = type("Defined", (Config,), {"__module__": "a_notebook"})
    with pytest.raises(SystemExit) as stopped:
        parse(defined, None, ["--mesh", "auto", "--target", "h100:1x8"])
    assert stopped.value.code == 2
    assert "Defined must be in a file" in capsys.readouterr().err


@dataclasses.dataclass(frozen=True)
class Shape:
    """A model.

    Attributes:
      width: features.
      depth: layers.
      own: what no flag can say.
      place: of another flag.
    """

    width: int = 8
    depth: int | None = None
    own: object = print
    place: str = "here"

    def __post_init__(self):
        if self.width < 1:
            raise ValueError(f"width={self.width} must be at least 1.")


@dataclasses.dataclass(frozen=True)
class Slow:
    kind: str = dataclasses.field(default="slow", init=False)
    decay: float = 0.1


@dataclasses.dataclass(frozen=True)
class Fast:
    kind: str = dataclasses.field(default="fast", init=False)
    bits: int = 32


SHAPES = {"small": Shape(), "large": Shape(512, 24)}
RULES = {"slow": Slow(), "fast": Fast()}


@dataclasses.dataclass(frozen=True)
class WithPresets(Config):
    """One run."""

    model: Shape = preset(SHAPES, "small", without=("place",))
    """The model's shape."""
    rule: Slow | Fast = preset(RULES, "slow")
    """The rule."""


@pytest.mark.parametrize(
    ("args", "model", "rule"),
    [
        ((), Shape(), Slow()),
        (("--model", "large"), Shape(512, 24), Slow()),
        (("--model=large", "--model.depth", "8"), Shape(512, 8), Slow()),
        (("--model.depth", "8", "--model", "large"), Shape(512, 8), Slow()),
        (("--model.width", "9", "--rule.decay", "0.5"), Shape(9), Slow(0.5)),
        (("--rule", "fast", "--rule.bits", "8"), Shape(), Fast(8)),
        (("--model", "large", "--model", "small"), Shape(), Slow()),
    ],
)
def test_preset_comes_first_and_its_fields_over_it(args, model, rule):
    found = parse(WithPresets, None, [*args, "--steps", "3"])
    assert found == WithPresets(3, model=model, rule=rule)
    assert type(found) is WithPresets


def test_help_lists_presets_and_the_fields_of_the_chosen_one(capsys):
    with pytest.raises(SystemExit):
        parse(WithPresets, "Train.", ["--model", "large", "--rule", "fast", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    for text in (
        "--model NAME is a preset: small, large. By default small",
        "--rule NAME is a preset: slow, fast",
        "--model.depth",
        "(default: 24)",
        "--rule.bits INT",
        "Training steps.",
        "The model's shape.",
    ):
        assert text in shown
    for text in ("--model.own", "--model.place", "--rule.kind", "--rule.decay"):
        assert text not in shown


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--model", "larg"), "must be one of small, large. Did you mean 'large'?"),
        (("--model.widht", "3"), "--model.width"),
        (("--model.width", "0"), "--model: width=0 must be at least 1."),
        (("--rule", "fast", "--rule.decay", "1"), "--rule.decay"),
    ],
)
def test_wrong_preset_or_field_is_named(args, said, capsys):
    with pytest.raises(SystemExit) as stopped:
        parse(WithPresets, None, list(args))
    assert stopped.value.code == 2
    captured = capsys.readouterr()
    assert said in " ".join((captured.out + captured.err).split())


@pytest.mark.parametrize(
    ("beside", "model", "rule"),
    [
        ((), Shape(512, 8), Fast(8)),
        (("--model", "small"), Shape(), Fast(8)),
        (("--model.width", "16"), Shape(16, 8), Fast(8)),
        (("--rule", "slow"), Shape(512, 8), Slow()),
    ],
)
def test_fields_of_a_runs_record_are_taken_up(beside, model, rule, tmp_path):
    """What run.json has is resolved; a preset beside it begins anew."""
    config = {
        "steps": 4,
        "model": {"width": 512, "depth": 8, "place": "here"},
        "rule": {"kind": "fast", "bits": 8},
    }
    file = tmp_path / "run.json"
    file.write_text(json.dumps({"config": config, "identity": {}}))
    found = parse(WithPresets, None, ["--config", str(file), *beside])
    assert found == WithPresets(4, model=model, rule=rule)
    file.write_text(json.dumps({"model": "large"}))
    assert parse(WithPresets, None, ["--config", str(file)]).model == Shape(512, 24)


@dataclasses.dataclass(frozen=True)
class Checked(Config):
    """Its own check needs the preset's class."""

    rule: Slow | Fast = preset(RULES, "slow")
    sizes: tuple[int, ...] = (1, 2)

    def __post_init__(self):
        if not isinstance(self.rule, Slow | Fast):
            raise TypeError("rule is a stand-in")
        if self.steps < 0:
            raise ValueError(f"steps={self.steps} must be at least 0.")


def test_config_checks_itself_once_its_presets_are_made(capsys):
    assert parse(Checked, None, ["--rule", "fast"]).rule == Fast()
    with pytest.raises(SystemExit) as stopped:
        parse(Checked, None, ["--steps", "-1"])
    assert stopped.value.code == 2
    assert capsys.readouterr().err == "steps=-1 must be at least 0.\n"


@dataclasses.dataclass(frozen=True)
class Listed:
    """A preset with a list.

    Attributes:
      sizes: of the layers.
    """

    sizes: tuple[int, ...] = (1, 2)


@dataclasses.dataclass(frozen=True)
class WithList:
    """One run."""

    model: Listed = preset({"two": Listed()}, "two")
    """The model."""


def test_empty_list_of_a_preset_is_taken_from_a_file(tmp_path):
    file = tmp_path / "run.json"
    file.write_text(json.dumps({"model": {"sizes": []}}))
    assert parse(WithList, None, ["--config", str(file)]).model == Listed(())


@dataclasses.dataclass(frozen=True)
class Outer:
    layers: int = 1
    shape: Shape = Shape()
    sizes: Listed = Listed()


@dataclasses.dataclass(frozen=True)
class WithParts:
    """One run."""

    model: Outer = preset({"small": Outer(), "wide": Outer(2, Shape(64))}, "small")
    """The model."""


def test_fields_of_a_presets_parts_are_flags_too(tmp_path, capsys):
    args = ["--model", "wide", "--model.shape.depth", "3", "--model.sizes.sizes", "4"]
    found = parse(WithParts, None, args)
    assert found == WithParts(Outer(2, Shape(64, 3), Listed((4,))))
    record = dataclasses.asdict(found)
    del record["model"]["shape"]["own"]
    file = tmp_path / "run.json"
    file.write_text(json.dumps({"config": record, "identity": {}}))
    assert parse(WithParts, None, ["--config", str(file)]) == found
    beside = ["--config", str(file), "--model.shape.width", "8"]
    assert parse(WithParts, None, beside).model.shape == Shape(8, 3)
    with pytest.raises(SystemExit):
        parse(WithParts, None, ["--model.shape.width", "0"])
    assert "--model: width=0 must be at least 1." in capsys.readouterr().err


def test_preset_without_a_name_is_named(capsys):
    with pytest.raises(SystemExit):
        parse(WithPresets, None, ["--model", "--steps", "3"])
    assert "--model needs a name: one of small, large" in capsys.readouterr().err


def test_searched_fields_of_a_file_give_way_to_the_search(tmp_path):
    """The mesh that a file names is not the one that is to be found."""
    file = tmp_path / "run.json"
    mesh = {"data": 2, "pipe": 1, "tensor": 1}
    file.write_text(json.dumps({"steps": 3, "mesh": mesh, "zero": 1}))
    seen = []

    def search(recipe: Path, target: str, others: Sequence[str]) -> list[str]:
        assert (recipe, target) == (Path(__file__), "cpu:4")
        seen.append(list(others))
        return ["--mesh.data", "4"]

    args = ["--config", str(file), "--mesh", "auto", "--target", "cpu:4"]
    found = flags.parse(Config, None, args, search=search)
    assert (found.steps, found.mesh) == (3, MeshShape(data=4))
    assert seen == [["--steps", "3"]]
    assert flags.SEARCHED == KNOBS
