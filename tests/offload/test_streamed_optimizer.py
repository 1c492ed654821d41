"""Which optimizers are streamed, and which are refused by name?"""

import optax
import pytest

import jaxpar
from jaxpar.optim import fused_adamw
from tests.equivalence.perceptron import make_engine

OFFLOAD = jaxpar.Offload(piece_mb=0.001)


def test_nothing_to_offload_leaves_the_optimizer() -> None:
    engine = make_engine(optax.sgd(0.1), 1, 1, 0, offload=jaxpar.Offload(None))
    assert not any("offload" in line for line in engine.explain().notes)


@pytest.mark.parametrize("bits", [8])
def test_a_form_of_its_own_is_refused(bits: int, compiled: list[str]) -> None:
    said = "optimizer=FusedOptimizer stores its state in a form of its own"
    with pytest.raises(ValueError, match=said):
        make_engine(fused_adamw(0.1, bits=bits), 1, 1, 0, offload=OFFLOAD)
    assert compiled == []


def test_notes_say_what_is_on_the_host_and_what_passes_whole() -> None:
    notes = make_engine(optax.lamb(0.1), 2, 1, 1, offload=OFFLOAD).explain().notes
    assert (
        "offload: the masters and moments of 4 of 4 parameters are in host memory."
        in notes
    )
    assert any("the update of 4 of them needs whole leaves" in line for line in notes)
