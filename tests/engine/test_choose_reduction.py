"""Is a reduction refused, by name, where it can't run?"""

import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import jaxpar
from jaxpar.optim import LocalGradients, PlainReduction, WithReduction
from tests.equivalence.perceptron import make_engine, make_piped_engine
from tests.optim.int8_reduction import Int8Reduction
from tests.optim.local_sgd import LocalSgd

SGD = optax.sgd(0.1)


class Silent(Int8Reduction):
    def communicated(self, leaves, wire):
        return {}


class Whole(Int8Reduction):
    """Sums that data should split, and does not."""

    def reduce(self, leaves, grads, carry, collectives):
        sums, carry = super().reduce(leaves, grads, carry, collectives)
        return [jnp.concatenate([x, x]) for x in sums], carry


class Growing(Int8Reduction):
    def reduce(self, leaves, grads, carry, collectives):
        sums, carry = super().reduce(leaves, grads, carry, collectives)
        return sums, {name: x.astype(jnp.bfloat16) for name, x in carry.items()}


@pytest.mark.parametrize(
    ("reduction", "zero", "options", "message"),
    [
        (
            Int8Reduction(),
            2,
            {},
            r"optimizer: its reduction, Int8Reduction, can't run with zero=2: the "
            r"backward pass then reduces .* Use zero=1",
        ),
        (Int8Reduction(), 3, {}, r"Int8Reduction, can't run with zero=3"),
        (
            Int8Reduction(),
            1,
            {"coupled_batch": True},
            r"with examples that are coupled: .* \(coupled_batch=False, no batch",
        ),
        (Silent(), 1, {}, r"Silent.communicated returns nothing on a mesh of 8 data"),
        (Whole(), 0, {}, r"Whole.reduce returns leaf .* but a reduction must return"),
        (Growing(), 1, {}, r"Growing.reduce returns leaf .* but `init` makes float32"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_reduction_that_can_not_run_is_refused_by_name(
    reduction, zero, options, message, compiled
):
    with pytest.raises(ValueError, match=message):
        make_engine(WithReduction(SGD, reduction), 8, 1, zero, **options)
    assert compiled == []


def test_local_gradients_are_refused_on_a_pipe():
    with pytest.raises(ValueError, match=r"can't run with pipe=2: .* Use pipe=1"):
        make_piped_engine(LocalSgd(0.1))


def test_local_gradients_are_refused_by_optimizers_that_do_not_sum_them():
    with pytest.raises(ValueError, match=r"OptaxUpdate.apply returns leaf params/"):
        make_engine(WithReduction(SGD, LocalGradients()), 8, 1, 0)


class NormOfLargest(PlainReduction):
    """Clips by the largest element."""

    def norm(self, grads):
        leaves = (jnp.abs(x).max() for x in grads.values())
        return jnp.max(jnp.stack([*leaves]))


def test_plain_reduction_with_another_norm_runs_at_every_stage():
    engine = jaxpar.initialize(
        model=lambda rngs: nnx.Linear(2, 1, rngs=rngs),
        loss_fn=lambda model, batch: jnp.mean(model(batch)),
        optimizer=WithReduction(SGD, NormOfLargest()),
        sample_batch=jnp.ones((8, 2)),
        mesh=jaxpar.MeshShape(data=8),
        zero=3,
    )
    # The gradients: of the kernel 1, of the bias 1.
    assert float(engine.step(jnp.ones((8, 2)))["grad_norm"]) == pytest.approx(1.0)
