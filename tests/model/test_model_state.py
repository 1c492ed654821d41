"""Does a model's mutable state keep its shape and dtype from step to step?

What a step would leave in another shape is refused before the step compiles.
"""

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxpar
from jaxpar.model.model_state import cast_model_state, with_leaves

BATCH = {"x": np.linspace(-1, 1, 64, dtype=np.float32).reshape(16, 4)}


class Remembering(nnx.Module):
    """Its state becomes what `change` makes of it in a call."""

    def __init__(self, change):
        self.linear = nnx.Linear(4, 6, rngs=nnx.Rngs(0))
        self.seen, self._change = nnx.Variable(jnp.zeros((3, 6))), change

    def __call__(self, x):
        out = self.linear(x)
        self._change(self, out)
        return out


def grow(model, out):
    model.seen.set_value(jnp.concatenate([model.seen[...], out[:1]]))


def split(model, out):
    model.seen.set_value((out.mean(0), out.sum(0)))


def forget(model, out):
    del model.seen


def make_half(model, out):
    model.seen.set_value((model.seen[...] + 1).astype(jnp.float16))


class Adding(nn.Module):
    """Has a second variable where it is applied, and not where it is made."""

    @nn.compact
    def __call__(self, x):
        self.variable("cache", "first", jnp.zeros, (2,))
        if not self.is_initializing():
            self.variable("cache", "second", jnp.zeros, (6,))
        return nn.Dense(6)(x)


class LastOutput(nn.Module):
    """Its state has a dim of the rows, more of them in a step than where it is made."""

    @nn.compact
    def __call__(self, x):
        out = nn.Dense(6)(x)
        self.variable("cache", "last", jnp.zeros, out.shape).value = out
        return out


def make_engine(model) -> jaxpar.Engine:
    return jaxpar.initialize(
        model=model,
        loss_fn=lambda model, batch: jnp.mean((model(batch["x"]) - 1.0) ** 2),
        optimizer=optax.sgd(0.1),
        sample_batch=BATCH,
        mesh=jaxpar.MeshShape(data=4, tensor=2),
    )


CASES = {
    "grows": (
        lambda rngs: Remembering(grow),
        r"model: a training step changes the shape of its state: seen from \(3, 6\) to "
        r"\(4, 6\)\. Every step runs the same program: initialise the state in its "
        r"final shape, without a dim of the batch's rows, and write into it",
    ),
    "becomes two": (
        lambda rngs: Remembering(split),
        r"state: seen from \(3, 6\) to nothing, seen/0 from nothing to \(6,\), seen/1 "
        r"from nothing to \(6,\)\. Every",
    ),
    "goes": (
        lambda rngs: Remembering(forget),
        r"state: seen from \(3, 6\) to nothing\. Every",
    ),
    "comes": (Adding(), r"state: cache/second from nothing to \(6,\)"),
}


@pytest.mark.parametrize("case", CASES)
def test_state_that_changes_its_shape_is_refused_before_anything_compiles(
    case, compiled
):
    model, message = CASES[case]
    with pytest.raises(ValueError, match=message):
        make_engine(model)
    assert compiled == []


def test_state_with_a_dim_of_rows_is_refused_before_the_step_compiles(compiled):
    engine = make_engine(LastOutput())
    made = list(compiled)
    message = r"shape of its state: cache/last from \(4, 6\) to \(16, 6\)"
    with pytest.raises(ValueError, match=message):
        engine.step(BATCH)
    assert compiled == made


def test_state_of_another_dtype_is_cast():
    engine = make_engine(lambda rngs: Remembering(make_half))
    for _ in range(2):
        engine.step(BATCH)
    (seen,) = engine.state.model_state.values()
    assert seen.dtype == jnp.float32
    assert np.array_equal(seen, np.full((3, 6), 2.0))


def test_new_state_of_the_model_keeps_the_dtypes_of_the_old():
    before = {"a": {"mean": jnp.zeros(3, jnp.bfloat16)}, "n": jnp.int32(0)}
    after = {"a": {"mean": jnp.full(3, 1.5)}, "n": jnp.float32(2)}
    cast = cast_model_state(after, before)
    assert (cast["a"]["mean"].dtype, cast["n"].dtype) == (jnp.bfloat16, jnp.int32)
    np.testing.assert_array_equal(cast["a"]["mean"], np.full(3, 1.5))


@pytest.mark.parametrize(
    ("after", "message"),
    [
        (
            {"a": jnp.ones(2)},
            r"state: a from \(3,\) to \(2,\)\. Every step runs the sa",
        ),
        ({}, r"state: a from \(3,\) to nothing\. Every"),
        ({"a": jnp.ones(3), "b": jnp.ones(())}, r"state: b from nothing to \(\)\."),
        (
            {name: jnp.ones(1) for name in "abcde"},
            r"a from \(3,\) to \(1,\), b from nothing .*, c from .* and 2 more\.",
        ),
    ],
)
def test_state_of_the_model_of_another_shape_raises(after, message):
    with pytest.raises(ValueError, match=message):
        cast_model_state(after, {"a": jnp.ones(3)})


def test_parts_without_state_are_left_out():
    found = with_leaves({"embed": {}, "blocks": {"u": jnp.ones(2)}, "head": {"a": {}}})
    assert found.keys() == {"blocks"}
