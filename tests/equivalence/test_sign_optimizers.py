"""Do optimizers that exchange signs give the same on any mesh of as many workers?

What each computes is in test_onebit_adam.py, test_onebit_lamb.py and
test_zero_one_adam.py.
"""

import itertools

import jax
import numpy as np
import pytest

import jaxpar
from jaxpar.optim import onebit_adam, onebit_lamb, zero_one_adam
from tests.equivalence.perceptron import (
    ROWS,
    batches,
    make_engine,
    make_piped_engine,
)

pytestmark = pytest.mark.filterwarnings(
    "ignore::jaxpar.engine.run_ahead.SkippedStepWarning"
)
DATA, STEPS = 4, 14
OPTIMIZERS = {
    "onebit_adam": onebit_adam(1e-2, 3),
    "onebit_lamb": onebit_lamb(1e-2, 3),
    "zero_one_adam": zero_one_adam(
        1e-2, 6, var_update_scaler=2, local_step_scaler=3, local_step_clipper=4
    ),
}
every_optimizer = pytest.mark.parametrize(
    "optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS
)


def losses_of(engine: jaxpar.Engine) -> list[float]:
    many = itertools.islice(itertools.cycle(batches()), STEPS)
    return [float(engine.step(batch)["loss"]) for batch in many]


@every_optimizer
@pytest.mark.parametrize(
    ("tensor", "zero", "options"),
    [
        (2, 1, {"accumulate": 2}),
        *(
            pytest.param(*case, marks=pytest.mark.thorough)
            for case in [
                (1, 0, {}),
                (2, 0, {}),
                (1, 2, {}),
                (2, 2, {"accumulate": 2}),
                (1, 1, {"precision": "fp16"}),
                (1, 1, {"precision": "bf16"}),
            ]
        ),
    ],
)
def test_results_do_not_depend_on_tensor_and_zero(
    tensor, zero, options, optimizer
) -> None:
    """Nor on micro-batches; in half precision on rounding alone."""
    engine = make_engine(optimizer, DATA, tensor, zero, **options)
    plain = make_engine(optimizer, DATA, 1, 1)
    bound = 2e-2 if "precision" in options else 1e-5
    assert losses_of(engine) == pytest.approx(losses_of(plain), rel=bound)
    engine.verify()
    engine.probe()


@every_optimizer
@pytest.mark.thorough
def test_results_do_not_depend_on_pipe(optimizer) -> None:
    mesh = jaxpar.make_mesh(jaxpar.MeshShape(data=DATA), jax.devices()[:DATA])
    piped = make_piped_engine(optimizer)
    plain = make_piped_engine(optimizer, mesh=mesh)
    assert losses_of(piped) == pytest.approx(losses_of(plain), rel=1e-5)
    piped.verify()


@every_optimizer
def test_a_step_that_is_not_finite_changes_nothing(optimizer) -> None:
    engine = make_engine(optimizer, DATA, 1, 1)
    losses_of(engine)
    before = jax.device_get(kept(engine))
    bad = {name: x.copy() for name, x in batches()[0].items()}
    bad["x"][ROWS - 1] = np.nan  # Of one worker alone.
    assert int(engine.step(bad)["skipped"]) == 1
    after = jax.device_get(kept(engine))
    jax.tree.map(np.testing.assert_array_equal, before, after)


def kept(engine: jaxpar.Engine) -> tuple:
    state = engine.state
    return state.params, state.opt_state, state.carried["reduction"]


@every_optimizer
@pytest.mark.parametrize(
    ("zero", "options", "said"),
    [
        (3, {}, "can't run with zero=3"),
        (1, {"coupled_batch": True}, "can't run with examples that are coupled"),
    ],
)
def test_where_they_can_not_run_is_refused(zero, options, said, optimizer) -> None:
    with pytest.raises(ValueError, match=said):
        make_engine(optimizer, DATA, 1, zero, **options)
