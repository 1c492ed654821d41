"""Does `Engine.verify` pass what is right at 64 GPUs, and name what is planted?"""

import re

import pytest

from jaxpar.compiled.link_rates import members_per_host, spans_hosts
from jaxpar.mesh import MeshShape
from tests.compiled.programs import Run, verify

COUPLED = Run(zero=3, coupled=True)
"""The compiler places what crosses data: a model must say where activations lie."""

LEFT_OUT = Run(zero=3, coupled=True, fault="data left out in a block")


def head_of(run: Run) -> int:
    """Bytes of the head, which the loss needs in the forward pass alone."""
    return 2 * run.vocab * run.width


def test_step_whose_collectives_the_compiler_places_keeps_to_its_stage(compiled):
    psi, step, violations = compiled(verify, COUPLED)
    assert violations == ()
    assert step.communicated["data"]["all-gather"] == pytest.approx(4 * psi, rel=2e-2)
    assert step.communicated["data"]["reduce-scatter"] == pytest.approx(
        2 * psi, rel=2e-2
    )
    # The table that embeds tokens makes logits too: its gradient crosses twice.
    table = 2 * COUPLED.vocab * COUPLED.width
    assert step.communicated["data"]["all-reduce"] == pytest.approx(table, rel=2e-2)
    assert step.state_bytes == pytest.approx(12 * psi / 64, rel=1e-3)


@pytest.mark.slow
def test_constraint_without_data_in_a_block_is_seen_and_the_operation_named(compiled):
    psi, _, (violation,) = compiled(verify, LEFT_OUT)
    allowed, factor = re.match(
        r"data: all-gather moves [\d,]+ bytes a step, but the budget is ([\d,]+) "
        r"\(([\d.]+) times as much\)",
        violation,
    ).groups()
    assert int(allowed.replace(",", "")) == pytest.approx(4 * psi, rel=2e-2)
    assert float(factor) > 5
    rows, width = 64 * LEFT_OUT.length, 4 * LEFT_OUT.width
    hidden = rf"{LEFT_OUT.layers} x all-gather of bf16\[{rows},{width}\], "
    product = r"\S+/dot_general at jaxpar/models/layers\.py:\d+\n"
    assert re.search(rf"  - [\d,]+ bytes: {hidden}{product}", violation)


@pytest.mark.parametrize(
    ("zero", "accumulate"),
    [(3, 2), pytest.param(1, 2, marks=pytest.mark.slow), (2, 1)],
)
def test_replicas_gather_inside_and_sum_shards_between_once_a_step(
    zero, accumulate, compiled
):
    """Hybrid sharding: 8 GPUs of a host share a state, 4 hosts sum their gradients."""
    run = Run(hosts=4, replica=4, zero=zero, accumulate=accumulate, layers=4)
    psi, step, violations = compiled(verify, run)
    assert violations == ()
    assert step.state_bytes == pytest.approx(12 * psi / 8, rel=1e-2)
    inside, between = step.communicated["data"], step.communicated["replica"]
    gathers, scatters = {
        1: (1, 1),
        2: (1, accumulate),
        3: (2 * accumulate, accumulate),
    }[zero]
    unneeded = accumulate * head_of(run) if zero == 3 else 0
    expected = 2 * gathers * psi - unneeded
    assert inside["all-gather"] == pytest.approx(expected, rel=2e-2)
    assert inside["reduce-scatter"] == pytest.approx(2 * scatters * psi, rel=2e-2)
    assert between == {"all-reduce": pytest.approx(2 * psi / 8, rel=2e-2)}


def test_replicas_are_linked_between_hosts_and_data_inside():
    shape = MeshShape(data=8, replica=4).axes
    assert not spans_hosts(("data",), shape, 8)
    assert spans_hosts(("replica",), shape, 8)
    assert members_per_host(("replica",), shape, 8) == 1


@pytest.mark.slow
@pytest.mark.parametrize("zero", [1, 3])
def test_step_on_tpus_keeps_to_its_stage(compiled, zero):
    run = Run(zero=zero, tpus="v5e:2x4", layers=4, width=512, vocab=4096)
    psi, step, violations = compiled(verify, run)
    assert violations == ()
    gathers = {1: 1, 3: 2}[zero]
    gathered = step.communicated["data"]["all-gather"]
    unneeded = head_of(run) if zero == 3 else 0
    assert gathered == pytest.approx(2 * gathers * psi - unneeded, rel=3e-2)
    # Without the tiles' padding.
    assert step.state_bytes == pytest.approx(12 * psi / 8, rel=2e-2)


def test_step_that_gathers_in_fp32_is_seen(compiled):
    run = Run(zero=1, fault="cast after the gather")
    _, _, (violation,) = compiled(verify, run)
    assert "data: all-gather moves" in violation
    assert "(2.0 times as much)" in violation
    assert "all-gather of f32[" in violation
