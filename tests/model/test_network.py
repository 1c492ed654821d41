"""What are the pure functions of a model in parts: parameters, names, draws, remat?"""

import copy
import functools
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxpar.model.bridge import Network
from jaxpar.model.remat import REMAT_POLICIES
from jaxpar.model.trainable import trainable_names
from jaxpar.tree import named_leaves
from tests.model import two_sections
from tests.model.toys import (
    BATCHES,
    HIDDEN,
    LAYERS,
    LENGTH,
    LINEN,
    NNX,
    ROWS,
    TIE,
    VOCAB,
    WIDTH,
    LinenBlock,
    loss_fn,
    make_model,
)

KEY = jax.random.key(0)
PARTS = {"nnx": NNX, "linen": LINEN}


def network_of(parts=NNX, fn=loss_fn, **change) -> Network:
    return make_model(parts, **change).make_network(fn, BATCHES[0])


@pytest.mark.parametrize("parts", PARTS.values(), ids=PARTS)
def test_parameters_of_blocks_are_stacked_and_say_so(parts):
    network = network_of(parts)
    assert isinstance(network, Network)
    params, state = network.init(KEY)
    leaves, names = named_leaves(params), network.dim_names()
    assert state == {}
    assert leaves.keys() == names.keys()
    stacked = [name for name in leaves if name.startswith("blocks/")]
    assert len(stacked) == 4
    for name in stacked:
        assert leaves[name].shape[0] == LAYERS
        assert names[name][0] == "layers"
    assert names["blocks/up/kernel"] == ("layers", "embed", "mlp")
    assert names["blocks/up/bias"] == ("layers",)
    assert names["embed/table"] == ("vocab", "embed")
    assert names["head/table"] is None


@pytest.mark.parametrize("make", [make_model, two_sections.make_model])
def test_names_of_parts_are_those_of_the_parameters(make):
    network = make().make_network(loss_fn, BATCHES[0])
    params, _ = jax.eval_shape(network.init, KEY)
    assert sorted(network.parts) == sorted(params)


def test_types_of_variables_are_those_of_the_parts_in_nnx():
    """Under the names of the parameters; Linen's have none."""

    class Adapter(nnx.Param):
        """A parameter of an adapter."""

    class Head(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.table = Adapter(jnp.ones((VOCAB, WIDTH)))

        def __call__(self, x):
            return x @ self.table[...].T

    network = make_model(head=Head, block=LinenBlock()).make_network(
        loss_fn, BATCHES[0]
    )
    found = network.variable_types()
    assert found == {"embed/table": nnx.Param, "head/table": Adapter}
    names = list(named_leaves(jax.eval_shape(network.init, KEY)[0]))
    assert trainable_names(Adapter, names, network) == {"head/table"}
    with pytest.raises(ValueError, match=r"no parameter is a LoRAParam; the model's"):
        trainable_names(nnx.LoRAParam, names, network)


@pytest.mark.parametrize("parts", PARTS.values(), ids=PARTS)
def test_blocks_are_initialised_from_keys_of_their_own(parts):
    params, _ = network_of(parts).init(KEY)
    kernels = np.asarray(params["blocks"]["up"]["kernel"])
    assert len({kernel.tobytes() for kernel in kernels}) == LAYERS
    tables = [params[part]["table"] for part in ("embed", "head")]
    assert not np.array_equal(*tables)


@pytest.mark.parametrize("parts", PARTS.values(), ids=PARTS)
def test_tied_leaf_is_there_once(parts):
    network = network_of(parts, tied=TIE)
    leaves = named_leaves(network.init(KEY)[0])
    assert leaves.keys() == network.dim_names().keys()
    shapes = [leaf.shape for leaf in leaves.values()]
    assert shapes.count((VOCAB, WIDTH)) == 1
    assert "head/table" not in leaves


class DeepHead(nnx.Module):
    """What it shares lies deeper than what it does not."""

    def __init__(self, rngs):
        self.out = nnx.Dict(table=nnx.Param(jnp.ones((VOCAB, WIDTH))))
        self.bias = nnx.Param(jnp.ones(VOCAB))

    def __call__(self, x):
        return x @ self.out["table"][...].T + self.bias[...]


def test_tied_leaf_may_lie_deep():
    tie = (("embed", "table"), ("head", "out/table"))
    network = network_of(head=DeepHead, tied=tie)
    params, _ = network.init(KEY)
    assert list(named_leaves(params["head"])) == ["bias"]
    logits, _ = network.run(
        lambda model, batch: model(batch["tokens"]),
        (params, {}),
        KEY,
        BATCHES[0],
        training=True,
    )
    plain = network_of(tied=TIE).run(
        lambda model, batch: model(batch["tokens"]) + 1,
        (params | {"head": {}}, {}),
        KEY,
        BATCHES[0],
        training=True,
    )[0]
    np.testing.assert_allclose(logits, plain, rtol=1e-6)


def test_one_pair_may_be_given_without_a_tuple_around():
    assert make_model(tied=TIE).tied_paths == {"table": "table"}
    assert make_model(tied=(TIE,)).tied_paths == {"table": "table"}
    assert make_model().tied_paths == {}


def loss_under(policy: str) -> tuple[Callable, dict]:
    """The loss of the parameters, and these."""
    names = ("hidden",) if policy == "save-names" else ()
    network = network_of(remat=policy, remat_names=names)

    def loss(params):
        return network.run(loss_fn, (params, {}), KEY, BATCHES[0], training=True)[0]

    return loss, network.init(KEY)[0]


@pytest.mark.parametrize("policy", REMAT_POLICIES[1:])
def test_remat_gives_the_same_gradients(policy):
    loss, params = loss_under(policy)
    plain, same = loss_under("none")
    jax.tree.map(np.testing.assert_array_equal, params, same)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-7)
    jax.tree.map(close, *(jax.jit(jax.grad(fn))(params) for fn in (loss, plain)))


def test_remat_keeps_of_every_block_what_its_policy_says():
    """The product of "up" under "dots", what is labelled under "save-names"."""
    kept = {}
    for policy in REMAT_POLICIES:
        loss, params = loss_under(policy)
        shapes = [leaf.shape for leaf in jax.tree.leaves(jax.vjp(loss, params)[1])]
        kept[policy] = shapes.count((LAYERS, ROWS, LENGTH, HIDDEN))
    assert kept.pop("none") >= 1
    assert kept == {"full": 0, "dots": 1, "save-names": 1, "offload": 0}


class Dropping(nnx.Module):
    def __init__(self, rngs):
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.drop(x)


class Ones(nnx.Module):
    def __init__(self, rngs):
        self.one = nnx.Param(jnp.ones(()))

    def __call__(self, tokens):
        return jnp.full((*tokens.shape, 512), self.one[...])


class AsItIs(nnx.Module):
    def __init__(self, rngs):
        self.one = nnx.Param(jnp.ones(()))

    def __call__(self, x):
        return x * self.one[...]


def drawn(num_blocks: int, key: jax.Array, *, training: bool = True):
    def output(model, batch):
        return model(batch["tokens"])

    parts = {"embed": Ones, "block": Dropping, "head": AsItIs}
    network = network_of(parts, output, num_blocks=num_blocks)
    variables = network.init(KEY)
    out, _ = network.run(output, variables, key, BATCHES[0], training=training)
    return np.asarray(out)


def test_every_block_draws_masks_of_its_own():
    """Each halves what is left: three that drew alike would leave a half."""
    left = [np.mean(drawn(num, KEY) != 0) for num in (1, 3)]
    assert left == pytest.approx([1 / 2, 1 / 8], abs=0.02)


def test_masks_follow_the_key_alone():
    one, same, other = (drawn(1, jax.random.key(seed)) for seed in (1, 1, 2))
    np.testing.assert_array_equal(one, same)
    assert not np.array_equal(one, other)


def test_two_calls_draw_masks_of_their_own():
    def both(model, batch):
        return model(batch["tokens"]), model(batch["tokens"])

    network = network_of({"embed": Ones, "block": Dropping, "head": AsItIs}, both)
    variables = network.init(KEY)
    first, second = network.run(both, variables, KEY, BATCHES[0], training=True)[0]
    assert not np.array_equal(first, second)
    np.testing.assert_array_equal(first, drawn(LAYERS, KEY))


def test_evaluation_drops_nothing():
    assert np.all(drawn(3, KEY, training=False) == 1)


def test_model_in_parts_can_be_copied():
    network = network_of()
    model = network.run(
        lambda model, _: model, network.init(KEY), KEY, BATCHES[0], training=False
    )[0]
    np.testing.assert_array_equal(
        copy.copy(model)(BATCHES[0]["tokens"]), model(BATCHES[0]["tokens"])
    )
    with pytest.raises(AttributeError, match="A PipelineModel has no __len__"):
        model.__len__()


def test_linen_parts_keep_their_own_names():
    class Two(nn.Module):
        @nn.compact
        def __call__(self, x):
            return LinenBlock(name="second")(LinenBlock(name="first")(x))

    params, _ = network_of(LINEN, block=Two()).init(KEY)
    assert sorted(params["blocks"]) == ["first", "second"]
