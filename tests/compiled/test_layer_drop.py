"""In a step for GPUs: is the next layer that runs gathered ahead, and no other?"""

import pytest

from tests.compiled.layer_drop import LAYERS, SHARE, Found, compile_step


@pytest.fixture(scope="module")
def found(compiled) -> Found:
    return compiled(compile_step)


def test_loops_run_over_the_layers_that_are_kept(found: Found) -> None:
    """The last turn of the way back is a loop of its own, without a gather."""
    kept = SHARE * LAYERS
    assert [loop.turns for loop in found.loops] == pytest.approx([kept, kept - 1, 1])
    assert not any(loop.branches for loop in found.loops)


def test_a_turn_gathers_one_layer_while_another_computes(found: Found) -> None:
    assert [loop.gathers for loop in found.loops] == [1, 1, 0]
    assert all(loop.beside for loop in found.loops if loop.gathers)
    assert any("gathered one ahead" in note for note in found.notes)


def test_layers_left_out_are_not_gathered(found: Found) -> None:
    """Embedding and head, and the first layer, are gathered at every step."""
    share = found.bytes_gathered / found.whole_bytes_gathered
    assert SHARE < share < SHARE + 0.1
