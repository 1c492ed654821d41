"""Does the table of model states say DeepSpeed's numbers, and what our steps hold?"""

import re
import runpy
import sys
from pathlib import Path

import pytest
from rich.console import Console

from jaxpar.compiled.collectives import Collective
from recipes.zero_memory_table import (
    DEEPSPEEDS_ELEMENTS,
    Config,
    deepspeed_bytes,
    elements_communicated,
    make_plans,
    model_states,
)
from tests.compiled import compilers
from tests.recipes.programs import ROOT, told

RECIPE = "recipes/zero_memory_table.py"
PSI, DEVICES = 1000, 8


def row(kind: str, dtype: str, elements: int, axes=("data",)) -> Collective:
    each = {"bf16": 2, "f32": 4}[dtype]
    return Collective(kind, axes, dtype, DEVICES, 1, each * elements, each * elements)


def test_deepspeeds_closed_forms_give_its_table():
    in_gb = [f"{number / 1e9:.3g}" for number in deepspeed_bytes(7.5e9, 64)]
    assert in_gb == ["120", "31.4", "16.6", "1.88"]


@pytest.mark.parametrize(
    ("stage", "rows"),
    [
        (0, [row("all-reduce", "bf16", PSI)]),
        (1, [row("all-gather", "bf16", PSI), row("reduce-scatter", "f32", PSI)]),
        (2, [row("all-gather", "f32", PSI), row("reduce-scatter", "bf16", PSI)]),
        (3, [row("all-gather", "bf16", 2 * PSI), row("reduce-scatter", "bf16", PSI)]),
    ],
)
def test_what_is_sent_is_counted_in_elements_over_data(stage, rows):
    others = [
        row("all-reduce", "bf16", PSI, axes=("tensor",)),
        row("collective-permute", "bf16", PSI, axes=("pipe",)),
        row("all-reduce", "f32", PSI, axes=("data", "tensor")),
    ]
    assert elements_communicated(rows + others) == DEEPSPEEDS_ELEMENTS[stage] * PSI


@pytest.fixture(scope="module")
def plans():
    config = Config(model="tiny", target=f"cpu:{DEVICES}", batch_size=DEVICES)
    return make_plans(config, Console())


@pytest.mark.slow
def test_states_are_deepspeeds_and_what_is_counted_besides(plans):
    """On CPUs, gradients cross, and are then held, in fp32; stage 3 needs no copies."""
    psi = plans[0].num_params
    besides = (0, 0, 2 * psi / DEVICES, 0)
    for plan, theirs, more in zip(
        plans, deepspeed_bytes(psi, DEVICES), besides, strict=True
    ):
        own, shards = model_states(plan), DEVICES if plan.zero else 1
        assert sum(own.values()) == pytest.approx(theirs + more, rel=5e-3)
        assert sum(own.values()) <= plan.memory.peak
        assert own["masters"] == pytest.approx(4 * psi / shards, rel=5e-3)
        assert own["Adam"] == pytest.approx(8 * psi / shards, rel=5e-3)


@pytest.mark.slow
def test_elements_that_cross_are_deepspeeds(plans):
    for plan in plans:
        communicated = elements_communicated(plan.program.collectives) / plan.num_params
        assert communicated == pytest.approx(DEEPSPEEDS_ELEMENTS[plan.zero], rel=0.01)


@pytest.mark.slow
def test_command_prints_both_tables_and_draws_them(monkeypatch, capsys, tmp_path: Path):
    """Ours are at or below DeepSpeed's, at stage 3 by 2 Psi/N."""
    if not compilers.FOLDER.is_dir():
        pytest.skip(
            f"no compilers for GPUs in {compilers.FOLDER.name}/ beside the "
            "environment: `make test` on the main lane installs them"
        )
    chart = tmp_path / "new" / "chart.png"
    args = ["--model", "124m", "--png", str(chart)]
    monkeypatch.setattr(sys, "argv", [RECIPE, *args])
    runpy.run_path(str(ROOT / RECIPE), run_name="__main__")
    text = capsys.readouterr().out
    rows = re.findall(r"^ *([0-3]) +(\S+) +(\S+) .* (\S+) \((\d)\)", text, re.M)
    assert [int(number) for number, *_ in rows] == [0, 1, 2, 3]
    for _, theirs, ours, sent, elements in rows:
        assert float(ours) <= 1.01 * float(theirs)
        assert float(sent) == pytest.approx(float(elements), rel=0.01)
    assert float(rows[3][2]) == pytest.approx(14 * 0.1245 / 64, rel=0.01)
    assert "is above DeepSpeed's" not in text
    assert chart.read_bytes().startswith(b"\x89PNG")


def test_help_names_every_flag_and_what_it_does(monkeypatch, capsys):
    ended = told(monkeypatch, capsys, RECIPE, "--help")
    assert ended.code == 0
    for text in ("--target", "--model", "--png", "The chart's file"):
        assert text in ended.text
