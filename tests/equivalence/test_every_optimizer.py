"""Does every optimizer of optax train at ZeRO 3 as on one device, or say why not?

Losses of 6 steps, and parameters by leaf, to 1e-5 relative.
"""

import pytest

from tests.equivalence import optax_table
from tests.equivalence.perceptron import batches, make_engine, run_plainly
from tests.equivalence.problems import distance

NAMES = [
    name if name == "noisy_sgd" else pytest.param(name, marks=pytest.mark.slow)
    for name in optax_table.NAMES
]


def check(name: str, zero: int) -> None:
    optimizer = optax_table.make(name)
    takes_value = name in optax_table.TAKE_VALUE
    losses, params = run_plainly(optimizer, takes_value=takes_value)
    engine = make_engine(optimizer, 4, 2, zero)
    assert [float(engine.step(batch)["loss"]) for batch in batches()] == pytest.approx(
        losses, rel=1e-5
    )
    assert distance(engine.state.params, params) <= 1e-5


@pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")
@pytest.mark.parametrize("name", NAMES)
def test_optimizer_trains_like_one_device(name: str) -> None:
    check(name, zero=3)


@pytest.mark.slow
@pytest.mark.parametrize("zero", [0, 1, 2])
@pytest.mark.parametrize("name", ["noisy_sgd", "muon", "schedule_free", "soap"])
def test_at_every_stage(name: str, zero: int) -> None:
    check(name, zero)


@pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")
@pytest.mark.parametrize("name", optax_table.REFUSED)
def test_optimizer_that_a_step_cannot_run_is_said_before_anything_compiles(
    name: str, compiled: list[str]
) -> None:
    make, message = optax_table.REFUSED[name]
    optimizer = make()
    compiled.clear()
    with pytest.raises(ValueError, match=message):
        make_engine(optimizer, 4, 2, zero=3)
    assert compiled == []
