"""Does a step of one or of several programs donate, delete and name what it should?"""

import gc
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxpar
from jaxpar.engine.host_programs import HostBetween, StepProgram
from jaxpar.engine.step_program import OneJit
from tests.equivalence.perceptron import batches, make_engine
from tests.optim.numpy_adam import NumpyAdam, NumpyUpdate

RATE = 1e-2
KINDS = {"gradients": NumpyAdam(RATE), "step": optax.adam(RATE)}


def make(optimizer: Any) -> jaxpar.Engine:
    return make_engine(optimizer, 4, 2, zero=1)


def pair() -> list[jaxpar.Engine]:
    """Engines of NumPy's Adam, and of optax's."""
    return [make(optimizer) for optimizer in KINDS.values()]


def test_update_decides_what_steps():
    found = [engine.loss().program.step for engine in pair()]
    assert list(map(type, found)) == [HostBetween, OneJit]
    assert all(isinstance(each, StepProgram) for each in found)


@pytest.mark.parametrize("first", KINDS)
def test_programs_are_traced_by_name_in_their_order(first):
    engine = make(KINDS[first])
    names = {"gradients": ["gradients", "update"], "step": ["step"]}[first]
    assert list(engine.traces()) == names == list(engine.lowered())


def test_one_copy_of_the_state_is_alive() -> None:
    """What the step was given is deleted, on the device and on the host."""
    engine, alive = make(NumpyAdam(RATE)), []
    for batch in batches()[:3]:
        before = list(engine._leaves)
        engine.step(batch)
        assert all(leaf.is_deleted() for leaf in before)
        gc.collect()
        alive.append(len([x for x in jax.live_arrays() if x.shape == (64, 8)]))
    # The parameter and two moments; other engines' arrays don't change.
    assert len(set(alive)) == 1
    given = jax.tree.map(jnp.copy, engine.state)
    kept = jax.tree.leaves(given.opt_state)
    engine.train_step(given, batches()[0])
    assert all(leaf.is_deleted() for leaf in kept)


def test_lowered_program_is_named() -> None:
    engine, plain = pair()
    message = r"lower: part=None must be one of this step's programs: 'gradients', 'up"
    with pytest.raises(ValueError, match=message):
        engine.lower()
    assert "jax.buffer_donor" not in engine.lower("gradients").as_text()
    assert "tf.aliasing_output" in engine.lower("update").as_text()
    with pytest.raises(ValueError, match=r"part='update' must be one .*: 'step'"):
        plain.lower("update")


def test_what_the_host_returns_is_checked() -> None:
    class Halved(NumpyUpdate):
        def on_host(self, grads, params, opt_state, **given):
            del given
            halved = jax.tree.map(lambda x: x.astype(jnp.float16), grads)
            return halved, params, opt_state

    class Makes(NumpyAdam):
        def make_update(self, spec):
            return Halved(self)

    engine = make(Makes(RATE))
    message = (
        r"optimizer: Halved\.on_host returns leaf grads/out/bias as float16\[8\], but "
        r"it takes float32\[8\]"
    )
    with pytest.raises(ValueError, match=message):
        engine.step(batches()[0])
