"""Is a loss function run up to its call of the model, and what does a part then get?"""

import copy

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxpar.model.bridge import make_network
from jaxpar.model.proxies import (
    Call,
    ModelProxy,
    call_part,
    inputs_of,
    keywords_of,
    program_of,
    run_part,
    shape_of,
)

X = np.arange(6.0, dtype=np.float32).reshape(2, 3)


class Scaled(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, power: int = 1):
        self.scale, self.power = nnx.Param(jnp.full(3, 2.0)), power

    def __call__(self, x, shift=0.0, *, twice=False):
        y = x * self.scale[...] ** self.power + shift
        return 2 * y if twice else y


class TakesAny(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.scale = nnx.Param(rngs.params.normal((3,)))

    def __call__(self, x, **options):
        return x * len(options)


class LinenScaled(nn.Module):
    @nn.compact
    def __call__(self, x, *, training):
        return x + 1 if training else x


def network_of(model):
    return make_network(model, lambda model, batch: model(batch, training=True), X)


def test_arguments_of_the_call_are_recorded_and_nothing_after_it_runs():
    def loss_fn(model, batch):
        model(batch["x"] * 2, "as text", training=model.training)
        raise AssertionError("nothing runs after the call")

    call = inputs_of(loss_fn, {"x": X}, training=True)
    np.testing.assert_array_equal(call.args[0], X * 2)
    assert (call.args[1], call.kwargs) == ("as text", {"training": True})


def test_arrays_of_a_call_are_leaves_and_flags_stay_flags():
    call = Call((X, 3), {"mask": X > 1, "training": False})
    leaves, structure = jax.tree.flatten(call)
    assert leaves[0] is X
    assert leaves[1] is call.kwargs["mask"]
    assert len(leaves) == 2
    back = jax.jit(lambda call: call.args[0] * call.args[1])(call)
    np.testing.assert_array_equal(back, X * 3)
    again = jax.tree.unflatten(structure, [leaf + 0 for leaf in leaves])
    assert (again.args[1], again.kwargs["training"]) == (3, False)
    other = jax.tree.structure(Call((X, 3), {"mask": X > 1, "training": True}))
    assert structure != other


def test_block_and_head_get_the_hidden_values_and_the_keywords():
    call = Call((X, 7), {"twice": True}).passing("hidden")
    assert (call.args, call.kwargs) == (("hidden",), {"twice": True})


def test_loss_function_gets_the_answer():
    proxy = ModelProxy(lambda call: call.args[0] + 1, training=False)
    assert (proxy(1), proxy.training, proxy.num_calls) == (2, False, 1)


def test_second_call_raises():
    proxy = ModelProxy(lambda call: 0, training=True)
    proxy(X)
    with pytest.raises(ValueError, match=r"loss_fn: it calls the model twice, but a"):
        proxy(X)


def test_attribute_of_the_model_raises_and_python_may_ask_for_its_own():
    proxy = ModelProxy(lambda call: 0, training=True)
    with pytest.raises(ValueError, match=r"loss_fn: it reads model\.head, but a Pip"):
        _ = proxy.head
    with pytest.raises(AttributeError, match=r"A PipelineModel has no __jax_array__"):
        proxy.__jax_array__  # noqa: B018
    assert copy.copy(proxy).num_calls == 0


WRONG_CALLS = {
    "no call": (lambda model, x: x.mean(), TypeError, r"it never called model\(\.\.\."),
    "a function": (
        lambda model, x: model(x, act=jnp.tanh),
        TypeError,
        r"it calls the model with act of type \w+, but a part can only get arrays",
    ),
    "an object": (
        lambda model, x: model({"a": x, "b": object()}),
        TypeError,
        r"it calls the model with argument 0/b of type object, but",
    ),
    "inside vmap": (
        lambda model, x: jax.vmap(model)(x),
        ValueError,
        r"it calls the model inside jax\.checkpoint, jax\.vmap, .* choose what to rec",
    ),
    "inside checkpoint": (
        lambda model, x: jax.checkpoint(lambda x: model(x))(x),
        ValueError,
        r"it calls the model inside jax\.checkpoint",
    ),
}


@pytest.mark.parametrize("case", WRONG_CALLS)
def test_call_that_can_not_be_split_raises(case):
    loss_fn, error, message = WRONG_CALLS[case]
    with pytest.raises(error, match=f"^loss_fn: {message}"):
        inputs_of(loss_fn, X, training=True)


def test_part_gets_only_the_keywords_that_it_takes():
    given = {"twice": True, "shift": 1.0, "segment_ids": X}
    model = Scaled(nnx.Rngs(0))
    got = call_part(model, Call((X,), given))
    np.testing.assert_array_equal(got, 2 * (2 * X + 1))
    # By place it has the shift already.
    got = call_part(model, Call((X, 5.0), given))
    np.testing.assert_array_equal(got, 2 * (2 * X + 5))
    assert call_part(TakesAny(nnx.Rngs(0)), Call((1,), given)) == 3


@pytest.mark.parametrize(
    ("model", "taken"),
    [
        (Scaled, {"shift", "twice"}),
        (TakesAny, None),
        (LinenScaled(), {"training"}),
    ],
)
def test_keywords_of_a_part_are_those_of_its_signature(model, taken):
    assert keywords_of(network_of(model), Call((X,), {"training": True})) == taken


def test_part_runs_with_its_parameters():
    network, call = network_of(Scaled), Call((X,), {"twice": True})
    params = {"scale": jnp.array([1.0, 2.0, 3.0])}
    given = network, (params, {}), call, jax.random.key(0)
    out, _ = run_part(*given, training=True)
    np.testing.assert_array_equal(out, 2 * X * [1, 2, 3])
    shape = shape_of(network, call)
    assert (shape.shape, shape.dtype) == (X.shape, X.dtype)


def test_programs_are_equal_for_equal_computations_alone():
    call = Call((X,), {})
    one, same, other = (
        program_of(network_of(lambda rngs, power=power: Scaled(rngs, power)), call)
        for power in (2, 2, 3)
    )
    assert one == same
    assert one != other
