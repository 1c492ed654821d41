"""Is the exposed communication of steps compiled for H200s read, shown and bounded?"""

import dataclasses
import re

import pytest

from tests.compiled.exposed_steps import expose
from tests.compiled.programs import Run

TWO_LAYERS = Run(hosts=1, layers=2, zero=1)
LINKS, MATMULS = 0.8 * 450e9, 0.803 * 989.4e12
"""Bytes per second inside a host, and FLOP/s."""


def test_all_that_is_sent_has_a_wire_and_kernels_hide_a_part(compiled):
    step = compiled(expose, TWO_LAYERS)
    found = step.program.communication
    assert found.devices_per_host == 8
    rows = {row.kind: row for row in found.by_kind}
    for kind in ("all-gather", "reduce-scatter"):
        row = rows[kind]
        assert row.axes == ("data",)
        assert row.sent_bytes == pytest.approx(2 * step.psi * 7 / 8, rel=1e-2)
        assert row.wire_seconds == pytest.approx(row.sent_bytes / LINKS)
        # Nothing is in a loop: each start in the text is one that runs.
        assert row.count - row.num_sync == step.starts[kind]
    sent = sum(row.sent_bytes for row in step.program.collectives)
    assert sum(row.sent_bytes for row in rows.values()) == pytest.approx(sent, abs=99)
    tokens, layers = TWO_LAYERS.length, 12 * TWO_LAYERS.width**2 * TWO_LAYERS.layers
    head = TWO_LAYERS.vocab * TWO_LAYERS.width
    # Blocks run again in the backward pass: four passes of two FLOPs a parameter.
    multiplied = 2 * tokens * (4 * layers + 3 * head) / MATMULS
    assert multiplied < found.kernel_seconds < 20 * multiplied
    # Of two layers, the first is gathered before all, and the last scattered behind.
    exposed, wire = found.exposed_seconds, found.wire_seconds
    assert max(0.5 * wire, wire - found.kernel_seconds) < exposed < wire


def test_explain_shows_what_is_exposed(compiled):
    step = compiled(expose, TWO_LAYERS)
    found = step.program.communication
    said = (
        f"{1e3 * found.exposed_seconds:.1f} of {1e3 * found.wire_seconds:.1f} ms of "
        "communication are exposed by the compiled schedule, at assumed rates, with 8 "
        "devices a host; nothing is measured"
    )
    assert said in step.shown.splitlines()
    assert f"- {said}" in step.details.splitlines()
    row = re.search(r"^ *all-gather +data +(\d+) +(\d+) ", step.details, re.MULTILINE)
    assert row is not None
    count, sync = map(int, row.groups())
    assert count - sync == step.starts["all-gather"]


def test_verify_names_what_is_exposed_by_its_line(compiled):
    step = compiled(expose, TWO_LAYERS)
    (violation,) = step.violations
    first, *causes = violation.splitlines()
    exposed = 1e3 * step.program.communication.exposed_seconds
    assert first == (
        f"exposed: kernels wait {exposed:.1f} ms a step for collectives, by the "
        "compiled schedule at assumed rates, but the budget is 0 ms."
    )
    named = re.findall(r"- ([\d.]+) ms: \d+ x (\S+) of \S+", violation)
    waits = [float(milliseconds) for milliseconds, _ in named]
    assert waits == sorted(waits, reverse=True)
    assert {kind for _, kind in named} >= {"all-gather", "reduce-scatter"}
    assert re.search(r" at jaxpar/\S+\.py:\d+$", causes[0])


@pytest.mark.thorough
def test_schedule_and_rule_differ_where_layers_gather_for_themselves(compiled):
    """The rule hides all that stage 3 sends; the schedule gathers layer by layer."""
    run = dataclasses.replace(TWO_LAYERS, zero=3, layers=8)
    step = compiled(expose, run)
    found = step.program.communication
    gathers = [row for row in found.by_kind if row.kind == "all-gather"]
    assert sum(row.count for row in gathers) >= 2 * run.layers
    assert found.exposed_seconds > 0.1 * found.wire_seconds


@pytest.mark.thorough
def test_one_half_of_the_rows_computes_while_the_other_is_summed_over_tensor(compiled):
    run = Run(hosts=1, tensor=4, layers=4, width=4096, length=4096, rows=4)
    whole = dataclasses.replace(run, two_batches=False)
    halves, one = (
        {
            row.kind: row
            for row in compiled(expose, each).program.communication.by_kind
            if row.axes == ("tensor",)
        }["all-reduce"]
        for each in (run, whole)
    )
    assert halves.sent_bytes == pytest.approx(one.sent_bytes, rel=1e-2)
    assert halves.count == 2 * one.count, "each half is summed by itself"
    assert halves.exposed_seconds < 0.8 * one.exposed_seconds
