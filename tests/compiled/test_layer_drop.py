"""Is nothing gathered, in a step for GPUs, for a layer that is left out?"""

from tests.compiled.layer_drop import gathers_of_layers


def test_layers_are_gathered_in_the_branch_that_runs_them(compiled) -> None:
    found = compiled(gathers_of_layers)
    assert found, "layers are gathered in the loop"
    assert all(found)
