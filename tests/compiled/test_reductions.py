"""Does a step in int8 move a quarter of the bytes on GPUs, and those that it names?"""

import pytest

from tests.compiled.reductions import LAYERS, WIDTH, traffic

PSI = LAYERS * (WIDTH + 1) * WIDTH


@pytest.mark.parametrize(
    ("zero", "tensor"),
    [(1, 1), *(pytest.param(*c, marks=pytest.mark.thorough) for c in [(0, 1), (1, 2)])],
)
def test_int8_moves_a_quarter_of_the_bytes_and_those_that_it_names(
    zero, tensor, compiled
):
    """The plain reduction moves fp32. With tensor a shard of a leaf is exchanged."""
    found = compiled(traffic, zero, tensor)
    plain, form = (
        sum(n for kind, n in each.communicated["data"].items() if "reduce" in kind)
        for each in found["plain"]
    )
    assert plain == pytest.approx(form, rel=1e-3)
    step, form = (each.communicated["data"] for each in found["int8"])
    assert step["all-to-all"] == form["all-to-all"]
    assert step["all-to-all"] == pytest.approx(plain / 4, rel=1e-2)
    assert not any("reduce" in kind for kind in step)
    gathered = {0: PSI, 1: 4 * PSI // tensor}[zero]
    assert step["all-gather"] == pytest.approx(gathered, rel=1e-2)
    assert form["all-gather"] == pytest.approx(gathered, rel=1e-2)
