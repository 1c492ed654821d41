"""Does a run whose gradients are sent in few bits train nearly as the plain one?

Six steps of 1e-3 move a leaf by about 1e-2. A gradient is off by 1/254 of the largest
of its block in 8 bits, and by 1/14 in 4.
"""

import jax
import numpy as np
import optax
import pytest

import jaxpar
from jaxpar.optim import QuantizedReduction, WithReduction
from tests.equivalence.perceptron import (
    batches,
    make_engine,
    make_piped_engine,
    run_plainly,
)
from tests.equivalence.problems import distance

ADAMW = optax.adamw(1e-3, eps=1e-6)
BOUNDS = {8: 1e-3, 4: 1e-2}


def quantized(bits: int, **options: bool) -> WithReduction:
    return WithReduction(ADAMW, QuantizedReduction(bits, block=64, **options))


def losses_of(engine: jaxpar.Engine) -> list[float]:
    return [float(engine.step(batch)["loss"]) for batch in batches()]


@pytest.mark.parametrize(
    ("bits", "data", "tensor", "zero", "options"),
    [
        (4, 4, 2, 1, {"accumulate": 2}),
        (8, 4, 2, 2, {}),
        *(
            pytest.param(*case, marks=pytest.mark.thorough)
            for case in [
                (8, 8, 1, 0, {}),
                (4, 4, 2, 0, {"clip_norm": 0.5}),
                (8, 8, 1, 1, {"precision": "fp16"}),
                (4, 8, 1, 2, {"precision": "bf16"}),
            ]
        ),
    ],
)
def test_trains_like_the_plain_reduction_and_keeps_to_its_bytes(
    bits, data, tensor, zero, options
) -> None:
    engine = make_engine(quantized(bits), data, tensor, zero, **options)
    losses, params = run_plainly(ADAMW, takes_value=False)
    assert losses_of(engine) == pytest.approx(losses, rel=2e-2 if options else 5e-3)
    assert 1e-6 < distance(engine.state.params, params) < BOUNDS[bits]
    engine.verify()
    engine.probe()
    sent = engine.closed_form_budget().communicated["data"]
    elements = (16 * 64 + 64) // tensor + 64 * 8 + 8
    # Blocks of 64 with a scale; the last one of each data shard's part is padded.
    padded = elements + 4 * 64 * data
    assert sent["all-to-all"] <= padded * (bits / 8 + 4 / 64)


def test_what_rounding_leaves_out_is_in_the_next_steps_gradient() -> None:
    """So the sum of many steps' gradients is the sum of the plain ones."""
    scaled = optax.sgd(1e-3)

    def ends(optimizer: object) -> object:
        engine = make_engine(optimizer, 8, 1, 1)
        for _ in range(30):
            engine.step(batches()[0])
        return engine.state.params

    right = ends(scaled)
    fed, lost = (
        distance(ends(WithReduction(scaled, QuantizedReduction(4, feedback=f))), right)
        for f in (True, False)
    )
    assert fed < lost / 2


@pytest.mark.thorough
def test_trains_on_a_pipe() -> None:
    plain, own = make_piped_engine(ADAMW), make_piped_engine(quantized(8))
    assert losses_of(own) == pytest.approx(losses_of(plain), rel=1e-3)
    own.verify()


@pytest.mark.filterwarnings("ignore::jaxpar.engine.run_ahead.SkippedStepWarning")
def test_a_gradient_that_is_not_finite_skips_the_step() -> None:
    """Though codes hold no NaN."""
    engine = make_engine(quantized(4), 8, 1, 1)
    engine.step(batches()[0])
    before = jax.device_get(engine.state.carried["reduction"])
    wrong = {name: np.full_like(rows, np.inf) for name, rows in batches()[0].items()}
    assert int(engine.step(wrong)["skipped"]) == 1
    after = jax.device_get(engine.state.carried["reduction"])
    jax.tree.map(np.testing.assert_array_equal, before, after)
