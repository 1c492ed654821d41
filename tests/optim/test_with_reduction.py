"""Does an optimizer keep its update, with another reduction?"""

import optax
import pytest

from jaxpar.optim import PlainReduction, WithReduction, fused_adamw
from tests.equivalence.perceptron import make_engine
from tests.optim.int8_reduction import Int8Reduction
from tests.optim.sign_momentum import SignMomentum

OWN = Int8Reduction()


@pytest.mark.parametrize(
    "optimizer", [optax.adamw(1e-3), fused_adamw(1e-3)], ids=["optax", "fused"]
)
def test_update_is_the_optimizers_with_the_reduction(optimizer):
    plain = make_engine(optimizer, 8, 1, zero=1).placement
    own = make_engine(WithReduction(optimizer, OWN), 8, 1, zero=1).placement
    assert type(own.update) is type(plain.update)
    assert own.update.reduction is OWN
    assert isinstance(plain.update.reduction, PlainReduction)
    assert own.packed.opt_state == plain.packed.opt_state
    assert own.packed.carried.keys() - plain.packed.carried.keys() == {"reduction"}


@pytest.mark.usefixtures("unchecked_types")
def test_optimizer_that_makes_its_own_update_is_refused():
    said = r"optimizer=SignMomentum\(.* must be an optax .* attribute `reduction`\."
    with pytest.raises(TypeError, match=said):
        WithReduction(SignMomentum(1e-3), OWN)
