"""On absent H200s: is a layer one collective each way, gathered while one computes?

Counted in scheduled programs, loops at their trip counts: gathers and reduce-scatters
over data of more than a kilobyte. The rest of the model has two leaves of that size.
"""

import pytest

from tests.compiled.programs import Compiled, Run, compile_step

LAYERS = (4, 8)
MOST = {
    "all-gather": {1: 1, 2: 1, 3: 2},
    "reduce-scatter": {1: 1, 2: 1, 3: 1},
}
"""Kind of collective -> ZeRO stage -> how many a layer."""
BESIDE = 6
"""Of each kind: those of other leaves, and a layer's in two parts."""


def times(step: Compiled, kind: str) -> float:
    rows = step.program.collectives
    return sum(row.count for row in rows if row.kind == kind and "data" in row.axes)


@pytest.fixture(scope="module", params=[pytest.param(1, marks=pytest.mark.thorough), 3])
def steps(request, compiled):
    zero = request.param
    return zero, {n: compiled(compile_step, Run(zero=zero, layers=n)) for n in LAYERS}


def test_a_layer_is_gathered_and_reduced_by_one_collective_each(steps):
    zero, by_layers = steps
    for layers, step in by_layers.items():
        for kind, each in MOST.items():
            assert times(step, kind) <= each[zero] * layers + BESIDE, (layers, kind)


def test_memory_does_not_grow_with_gathered_layers(steps):
    """What ZeRO 3 holds for a layer more is its gradients' shards and its input."""
    zero, by_layers = steps
    few, many = (by_layers[n] for n in LAYERS)
    more = many.program.memory.temporaries - few.program.memory.temporaries
    layer = 2 * (many.psi - few.psi) // (LAYERS[1] - LAYERS[0])
    kept = layer if zero < 3 else 0
    assert more <= (LAYERS[1] - LAYERS[0]) * (kept + 0.25 * layer)
