"""Does explain say what an optimizer's update communicates beyond the closed form?"""

import dataclasses
import functools
import re

import optax
import pytest
from optax import contrib

from jaxpar.compiled.collectives import Collective
from jaxpar.compiled.explain import Explanation
from jaxpar.compiled.program import join_programs
from jaxpar.compiled.update_traffic import is_in_update, sent_text
from tests.equivalence.perceptron import make_engine

OPTIMIZERS = {
    "adamw": optax.adamw(1e-3),
    "schedule-free": contrib.schedule_free_adamw(1e-3),
    "lamb": optax.lamb(1e-3),
    "muon": contrib.muon(1e-3),
}
SAYS = "the optimizer's update sends, beyond the closed form of ZeRO "
MATRICES = 4 * (16 * 64 + 64 * 8)
"""Bytes of both kernels; of other shapes, so that Muon gathers each."""


@functools.cache
def explained(name: str, zero: int, data: int = 4, tensor: int = 1) -> Explanation:
    return make_engine(OPTIMIZERS[name], data, tensor, zero).explain()


def said(text: str) -> str:
    (line,) = re.findall(rf"^(?:- )?{SAYS}\d: (.*)$", text, re.MULTILINE)
    return line


@pytest.mark.parametrize(
    "zero", [1, *(pytest.param(z, marks=pytest.mark.thorough) for z in (2, 3))]
)
def test_matrices_of_muon_are_beyond_the_closed_form(zero: int) -> None:
    report = explained("muon", zero)
    number = f"{MATRICES * 3 // 4 / 1e3:.1f} kB all-gather over data, "
    for text in (str(report), report.details):
        assert said(text).startswith(number)
        # Three norms before the iterations, not a gradient.
        assert said(text).endswith("18 bytes all-reduce over data")


@pytest.mark.parametrize(
    ("name", "zero"),
    [
        ("adamw", 1),
        ("schedule-free", 3),
        *(
            pytest.param(name, zero, marks=pytest.mark.thorough)
            for name, zero in (
                *(("adamw", zero) for zero in (0, 2, 3)),
                *(("schedule-free", zero) for zero in (0, 1, 2)),
                ("muon", 0),
            )
        ),
    ],
)
def test_elementwise_rules_need_no_more_than_the_closed_form(
    name: str, zero: int
) -> None:
    report = explained(name, zero)
    assert SAYS not in str(report)
    assert said(report.details) == "nothing"


@pytest.mark.thorough
def test_norms_of_lamb_are_a_few_bytes() -> None:
    report = explained("lamb", 1)
    assert re.fullmatch(r"\d\d bytes all-reduce over data", said(str(report)))


def test_one_device_has_no_line() -> None:
    report = explained("adamw", 0, data=1)
    assert SAYS not in str(report)
    assert SAYS not in report.details


def test_programs_of_one_step_are_joined() -> None:
    row = Collective("all-gather", ("data",), "f32", 4, 1, 8000, 8000)
    program = dataclasses.replace(explained("adamw", 0, data=1).program, of_update=())
    parts = {"gradients": program, "update": dataclasses.replace(program)}
    assert join_programs(parts).of_update == ()
    parts["update"] = dataclasses.replace(program, of_update=(row,))
    assert sent_text(join_programs(parts).of_update) == "6.0 kB all-gather over data"


@pytest.mark.parametrize(
    ("op_name", "expected"),
    [
        ("jit(step)/update/vmap()/transpose", True),
        ("jit(step)/(shard_map/psum:update/vmap()/reduce_sum)", True),
        ("jit(step)/shard_map/update_norm/psum", False),
        ("jit(step)/shard_map/transpose(jvp(up))/all_gather", False),
        ("", False),
    ],
)
def test_scope_is_found_in_names(op_name: str, expected: bool) -> None:
    assert is_in_update(op_name) == expected


def test_explanation_in_json_has_it() -> None:
    assert '"of_update": [{"kind": "all-gather"' in explained("muon", 1).as_json()
