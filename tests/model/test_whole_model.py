"""Is a model out of an engine a function and a pytree, whatever it is made of?"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxpar.model.network import WholeModel
from tests.model import two_sections
from tests.model.toys import (
    BATCHES,
    LINEN,
    NNX,
    TIE,
    VOCAB,
    Block,
    loss_fn,
    make_model,
    plain_logits,
)

TOKENS = BATCHES[0]["tokens"]
MODELS = {
    "nnx": make_model(NNX),
    "linen": make_model(LINEN),
    "tied": make_model(LINEN, tied=TIE),
    "two sections": two_sections.make_model(),
}
models = pytest.mark.parametrize("name", MODELS)


def plain(name: str, params: dict) -> jax.Array:
    own = two_sections.plain_logits if name == "two sections" else plain_logits
    return own(params, TOKENS)


def call(model, batch):
    return model(batch["tokens"])


def close(found, right):
    np.testing.assert_allclose(found, right, rtol=1e-4, atol=1e-5)


@models
def test_init_makes_the_model_that_the_network_runs(name):
    """The network's own parameters, in evaluation, from shapes alone."""
    model = MODELS[name].init(7, jax.ShapeDtypeStruct(TOKENS.shape, TOKENS.dtype))
    assert isinstance(model, WholeModel)
    assert not model.training
    network = MODELS[name].make_network(loss_fn, BATCHES[0])
    params, _ = jax.jit(network.init)(jax.random.key(7))
    assert jax.tree.structure(model.params) == jax.tree.structure(params)
    jax.tree.map(close, model.params, params)

    @jax.jit
    def run(params):
        key = jax.random.key(7)
        return network.run(call, (params, {}), key, BATCHES[0], training=False)[0]

    own = run(params)
    close(model(TOKENS), own)
    close(own, plain(name, params))


def test_init_follows_its_seed_and_takes_keywords():
    model = MODELS["nnx"].init(1, TOKENS, positions=TOKENS % 3)
    same, other = (MODELS["nnx"].init(seed, TOKENS) for seed in (1, 2))
    jax.tree.map(np.testing.assert_array_equal, model.params, same.params)
    tables = [own.params["embed"]["table"] for own in (model, other)]
    assert not np.array_equal(*tables)
    got = model(TOKENS, positions=TOKENS % 3, temperature=2.0)
    close(got, plain_logits(model.params, TOKENS, TOKENS % 3, 2.0))


def test_init_refuses_parts_that_do_not_fit():
    model = make_model(block=lambda rngs: nnx.Linear(8, 5, rngs=rngs))
    with pytest.raises(ValueError, match=r"PipelineModel: blocks: a block is given"):
        model.init(0, TOKENS)


@models
def test_model_may_be_an_argument_of_a_jitted_function(name):
    """Which is compiled once for all parameters."""
    traced = []

    @jax.jit
    def logits(model, tokens):
        traced.append(name)
        return model(tokens)

    model = MODELS[name].init(0, TOKENS)
    close(logits(model, TOKENS), plain(name, model.params))
    other = model.with_params(jax.tree.map(lambda x: x * 0.5, model.params))
    close(logits(other, TOKENS), plain(name, other.params))
    assert traced == [name]


def test_model_is_a_tree_of_its_parameters_and_its_key():
    model = MODELS["nnx"].init(0, TOKENS)
    leaves, structure = jax.tree.flatten(model)
    assert len(leaves) == len(jax.tree.leaves(model.params)) + 1
    again = jax.tree.unflatten(structure, leaves)
    assert isinstance(again, WholeModel)
    np.testing.assert_array_equal(again(TOKENS), model(TOKENS))
    # Through jax.tree.map only its arrays change, and a gradient is a model too.
    grads = jax.grad(lambda params: model.with_params(params)(TOKENS).sum())(
        model.params
    )
    moved = model.with_params(jax.tree.map(jnp.subtract, model.params, grads))
    close(moved(TOKENS), plain_logits(moved.params, TOKENS))


@models
def test_blocks_and_then_head_are_a_call(name):
    model = MODELS[name].init(0, TOKENS)
    hidden = model.run_blocks(TOKENS)
    assert hidden.shape[:-1] == TOKENS.shape
    np.testing.assert_array_equal(model.run_head(hidden), model(TOKENS))
    # The head may be given a part of it.
    close(model.run_head(hidden[:, -1:]), model(TOKENS)[:, -1:])


def test_blocks_and_head_take_the_keywords_of_a_call():
    model = MODELS["nnx"].init(0, TOKENS)
    hidden = model.run_blocks(TOKENS, positions=TOKENS % 3)
    got = model.run_head(hidden, temperature=2.0)
    assert got.shape == (*TOKENS.shape, VOCAB)
    close(got, plain_logits(model.params, TOKENS, TOKENS % 3, 2.0))


class Dropping(Block):
    def __init__(self, rngs: nnx.Rngs):
        super().__init__(rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x, *, positions=None):
        return self.drop(super().__call__(x, positions=positions))


def test_other_parameters_leave_the_model_and_its_mode_as_they_are():
    network = make_model(block=Dropping).make_network(loss_fn, BATCHES[0])
    params, _ = jax.jit(network.init)(jax.random.key(0))
    for training in (True, False):
        model = WholeModel(network, (params, {}), jax.random.key(5), training=training)
        same = WholeModel(network, (params, {}), jax.random.key(5), training=training)
        zeros = model.with_params(jax.tree.map(jnp.zeros_like, params))
        assert model.params is params
        assert zeros.training == training
        assert not np.any(zeros(TOKENS))
        # It draws by the same key.
        again = zeros.with_params(params)
        np.testing.assert_array_equal(again(TOKENS), same(TOKENS))


def test_training_and_evaluation_are_different_programs():
    network = make_model(block=Dropping).make_network(loss_fn, BATCHES[0])
    params, _ = jax.jit(network.init)(jax.random.key(0))
    modes = []

    @jax.jit
    def logits(model):
        modes.append(model.training)
        return model(TOKENS)

    trained, evaluated = (
        WholeModel(network, (params, {}), jax.random.key(5), training=training)
        for training in (True, False)
    )
    close(logits(evaluated), plain_logits(params, TOKENS))
    assert not np.allclose(logits(trained), plain_logits(params, TOKENS), rtol=1e-3)
    assert modes == [False, True]


def test_keyword_that_no_part_takes_is_refused_outside_of_an_engine():
    model = make_model().init(0, TOKENS)
    message = r"no part takes the keyword position=; they take positions, temperature\."
    with pytest.raises(TypeError, match=message + r" Did you mean 'positions'\?"):
        model(TOKENS, position=jnp.zeros(TOKENS.shape))
    with pytest.raises(TypeError, match=r"no part takes the keyword heat="):
        model.run_head(model.run_blocks(TOKENS), heat=2.0)


def test_model_may_be_an_argument_of_a_lowered_function():
    model = make_model().init(0, TOKENS)
    lowered = jax.jit(lambda model, tokens: model(tokens)).lower(model, TOKENS)
    assert lowered.args_info[0][0].params["head"]["table"].shape == (VOCAB, 8)


class Counting(Block):
    """Its output depends on how often it was called."""

    def __init__(self, rngs: nnx.Rngs):
        super().__init__(rngs)
        self.calls = nnx.Variable(jnp.float32(0))

    def __call__(self, x, *, positions=None):
        self.calls.set_value(self.calls[...] + 1)
        return x + self.calls[...]


def test_calls_in_training_change_the_state_and_others_see_it_as_it_is():
    network = make_model(block=Counting).make_network(loss_fn, BATCHES[0])
    variables = jax.jit(network.init)(jax.random.key(0))
    for training in (True, False):
        model = WholeModel(network, variables, jax.random.key(5), training=training)
        first, second = model.run_blocks(TOKENS), model.run_blocks(TOKENS)
        np.testing.assert_allclose(second - first, 3 * training, atol=1e-5)
        counts = model.state["blocks"]["calls"].tolist()
        assert counts == [2 * training] * 3
    assert variables[1]["blocks"]["calls"].tolist() == [0] * 3


def test_state_is_an_argument_of_a_jitted_function_with_the_model():
    model = make_model(block=Counting).init(0, TOKENS)
    jitted = jax.jit(lambda model: model.run_blocks(TOKENS))
    first = jitted(model)
    model.state = jax.tree.map(lambda x: x + 1, model.state)
    np.testing.assert_allclose(jitted(model) - first, 3, atol=1e-5)
    again = model.with_params(model.params)
    np.testing.assert_array_equal(jitted(again), jitted(model))
