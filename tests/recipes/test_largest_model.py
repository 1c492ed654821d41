"""Does the search end at the most layers that fit, and does offload make them more?"""

import re
import runpy
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from recipes import largest_model
from recipes.largest_model import SETTINGS, Config, largest, shape_of
from tests.compiled import compilers
from tests.recipes.programs import ROOT, told

RECIPE = "recipes/largest_model.py"


@pytest.mark.parametrize(
    ("parameters", "shape"),
    [(1e6, (512, 1)), (1.2e9, (2048, 24)), (13e9, (5120, 41)), (100e9, (8192, 124))],
)
def test_a_guess_has_the_parameters_and_a_usual_shape(parameters, shape) -> None:
    width, layers = found = shape_of(parameters)
    assert found == shape
    if layers > 1:
        assert 12 * layers * width**2 == pytest.approx(parameters, rel=0.05)


def planned(peak: float, host_state: float = 0, on_disk: float = 0) -> Any:
    memory = types.SimpleNamespace(peak=peak, host_state=host_state)
    host = types.SimpleNamespace(on_disk=on_disk)
    return types.SimpleNamespace(memory=memory, host=host)


@pytest.mark.parametrize("on_host", [0, 12])
@pytest.mark.parametrize("fixed", [0.0, 0.1e9, 3e9])
@pytest.mark.parametrize("guess", [1.0, 5.0, 60.0])
def test_search_ends_at_the_most_that_fit(on_host, fixed, guess, monkeypatch) -> None:
    compiled = []

    def plan_of(config: Config, setting: str, width: int, layers: int):
        compiled.append(layers)
        peak = fixed + layers * 12 * width**2 * 5.1
        return planned(peak=peak, host_state=layers * 12 * width**2 * on_host)

    monkeypatch.setattr(largest_model, "plan_of", plan_of)
    found = largest(Config(host=(20.0, 1e9)), "nothing", 16.0, guess)
    assert found is not None
    most = (16e9 - fixed) / 5.1
    if on_host:
        most = min(most, 20e9 / on_host)
    assert found.layers == int(most // (12 * found.width**2))
    assert len(compiled) <= 5


def test_nothing_is_found_where_a_layer_does_not_fit(monkeypatch) -> None:
    huge = planned(peak=1e12)
    monkeypatch.setattr(largest_model, "plan_of", lambda *_: huge)
    assert largest(Config(), "nothing", 16.0, 5.0) is None


@pytest.mark.slow
def test_command_prints_the_table_and_draws_it(monkeypatch, capsys, tmp_path: Path):
    if not compilers.FOLDER.is_dir():
        pytest.skip(
            f"no compilers for GPUs in {compilers.FOLDER.name}/ beside the "
            "environment: `make test` on the main lane installs them"
        )
    chart = tmp_path / "new" / "chart.png"
    args = ["--limits", "4", "--seq-len", "256", "--png", str(chart)]
    monkeypatch.setattr(sys, "argv", [RECIPE, *args])
    runpy.run_path(str(ROOT / RECIPE), run_name="__main__")
    text = capsys.readouterr().out
    rows = re.findall(r"^ *4 +(\D+?) +([\d.]+)e9 +\S+ x \S+ +(\S+) +(\S+)", text, re.M)
    assert [name for name, *_ in rows] == list(SETTINGS)
    plain, *offloaded = rows
    assert float(plain[3]) == 0
    assert float(offloaded[1][1]) > 1.5 * float(offloaded[0][1]), "of the gradients"
    for _, parameters, peak, on_host in offloaded:
        assert float(parameters) > 2.5 * float(plain[1])
        assert 3.4 < float(peak) <= 4
        assert float(on_host) == pytest.approx(12 * float(parameters), rel=0.03)
    assert chart.read_bytes().startswith(b"\x89PNG")


def test_help_names_every_flag(monkeypatch, capsys) -> None:
    ended = told(monkeypatch, capsys, RECIPE, "--help")
    assert ended.code == 0
    for text in ("--limits", "--target", "--seq-len", "The chart's file"):
        assert text in ended.text
