"""Does a model in parts train as the same model written plainly, on one device?

The oracle is `toys.plain_logits`, jax.value_and_grad and optax, from the parameters
that the engine starts with. Losses to 1e-5 relative, for the engine adds micro-batches
up where the plain loop takes the batch whole.
"""

from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from tests.model.toys import (
    BATCHES,
    LAYERS,
    LINEN,
    NNX,
    TIE,
    Block,
    Head,
    cross_entropy,
    loss_fn,
    make_engine,
    make_model,
    params_of,
    plain_logits,
    plain_loss,
)

MIXED = {"embed": LINEN["embed"], "block": NNX["block"], "head": LINEN["head"]}
OTHER_MIX = {"embed": NNX["embed"], "block": LINEN["block"], "head": NNX["head"]}
MODELS = {
    "nnx": make_model(),
    "linen": make_model(LINEN),
    "linen block": make_model(OTHER_MIX),
    "linen ends, tied": make_model(MIXED, tied=TIE),
}


def train_plainly(
    loss: Callable, params: dict, optimizer: optax.GradientTransformation
) -> list[float]:
    opt_state, losses = optimizer.init(params), []
    step = jax.jit(jax.value_and_grad(loss))
    for batch in BATCHES:
        value, grads = step(params, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        losses.append(float(value))
    return losses


def train(engine) -> list[float]:
    return [float(engine.step(batch)["loss"]) for batch in BATCHES]


@pytest.mark.parametrize("name", MODELS)
def test_parts_train_as_the_plain_model(name):
    engine = make_engine(MODELS[name], accumulate=2)
    params = params_of(engine)
    assert ("table" in params["head"]) == (name != "linen ends, tied")
    want = train_plainly(plain_loss, params, optax.adam(1e-2))
    assert train(engine) == pytest.approx(want, rel=1e-5)
    assert want[2] != pytest.approx(want[0], rel=1e-3), "it moves"


def test_sequence_of_blocks_is_stacked_in_its_order():
    scales = (0.1, 0.4, 1.6)
    blocks = [
        lambda rngs, scale=scale: Block(rngs, init=nnx.initializers.constant(scale))
        for scale in scales
    ]
    engine = make_engine(make_model(block=blocks))
    params = params_of(engine)
    for layer, scale in enumerate(scales):
        np.testing.assert_allclose(params["blocks"]["up"]["kernel"][layer], scale)
    want = train_plainly(plain_loss, params, optax.adam(1e-2))
    assert train(engine) == pytest.approx(want, rel=1e-5)


def test_sequence_of_equal_blocks_is_one_block_many_times():
    one, many = (
        params_of(make_engine(make_model(block=block)))
        for block in (Block, [Block] * LAYERS)
    )
    jax.tree.map(np.testing.assert_array_equal, one, many)


def test_sequence_of_one_block_is_that_block():
    params = params_of(make_engine(make_model(block=[Block], num_blocks=1)))
    assert params["blocks"]["up"]["bias"].shape[0] == 1


def test_tied_leaf_gets_the_sum_of_both_gradients():
    engine = make_engine(make_model(tied=TIE), optimizer=optax.sgd(1.0))
    before = params_of(engine)
    assert before["head"] == {}

    def loss(embed, head):
        apart = before | {"embed": {"table": embed}, "head": {"table": head}}
        return plain_loss(apart, BATCHES[0])

    table = before["embed"]["table"]
    of_embed, of_head = jax.jit(jax.grad(loss, argnums=(0, 1)))(table, table)
    engine.step(BATCHES[0])
    got = table - params_of(engine)["embed"]["table"]
    np.testing.assert_allclose(got, of_embed + of_head, rtol=1e-4, atol=1e-7)
    assert min(np.abs(of_embed).max(), np.abs(of_head).max()) > 1e-2


def positioned_loss(model, batch):
    logits = model(
        batch["tokens"], positions=batch["tokens"] % 3, temperature=jnp.float32(2)
    )
    return cross_entropy(logits, batch["targets"])


def positioned_plain_loss(params, batch):
    tokens = batch["tokens"]
    logits = plain_logits(params, tokens, tokens % 3, 2.0)
    return cross_entropy(logits, batch["targets"])


@pytest.mark.parametrize("parts", [NNX, LINEN], ids=["nnx", "linen"])
def test_keywords_reach_the_parts_that_take_them(parts):
    """Positions: embed and block. Temperature: head alone."""
    engine = make_engine(make_model(parts), loss_fn=positioned_loss, accumulate=2)
    want = train_plainly(positioned_plain_loss, params_of(engine), optax.adam(1e-2))
    assert train(engine) == pytest.approx(want, rel=1e-5)


class Doubling(nnx.Module):
    """A head whose call names its input as the embedding's does."""

    def __init__(self, rngs):
        self.head = Head(rngs)

    def __call__(self, tokens):
        return 2 * self.head(tokens)


def test_keyword_of_a_part_whose_input_has_that_name_is_not_its_input():
    def named_loss(model, batch):
        return cross_entropy(model(tokens=batch["tokens"]), batch["targets"])

    engine = make_engine(make_model(head=Doubling), loss_fn=named_loss)
    params = params_of(engine) | {"head": params_of(engine)["head"]["head"]}
    logits = plain_logits(params, BATCHES[0]["tokens"], temperature=0.5)
    want = cross_entropy(logits, BATCHES[0]["targets"])
    got = float(engine.step(BATCHES[0])["loss"])
    assert got == pytest.approx(float(want), rel=1e-5)


class AnyKeywords(nnx.Module):
    def __init__(self, rngs):
        self.head = Head(rngs)

    def __call__(self, x, **kwargs):
        return self.head(x, temperature=kwargs["heat"])


def test_part_that_takes_any_keyword_is_given_all():
    def heated_loss(model, batch):
        return cross_entropy(model(batch["tokens"], heat=2.0), batch["targets"])

    engine = make_engine(make_model(head=AnyKeywords), loss_fn=heated_loss)
    params = params_of(engine) | {"head": params_of(engine)["head"]["head"]}
    logits = plain_logits(params, BATCHES[0]["tokens"], temperature=2.0)
    want = cross_entropy(logits, BATCHES[0]["targets"])
    got = float(engine.step(BATCHES[0])["loss"])
    assert got == pytest.approx(float(want), rel=1e-5)


class LinenDropout(nn.Module):
    """Branches on a flag and on a word, as only Python's own can be."""

    @nn.compact
    def __call__(self, x, training: bool, kind: str = ""):
        bias = self.param("bias", nn.initializers.zeros, x.shape[-1:])
        if not training or kind != "dropout":
            return x + bias
        return nn.Dropout(0.5, deterministic=False)(x) + bias


@pytest.mark.parametrize("remat", ["none", "full"])
def test_flags_stay_flags_in_training_and_in_evaluation(remat):
    def flagged_loss(model, batch):
        out = model(batch["x"], training=model.training, kind="dropout")
        return jnp.mean(out)

    parts = {"embed": nn.Dense(4), "block": LinenDropout(), "head": nn.Dense(1)}
    batch = {"x": np.ones((4, 3), np.float32)}
    engine = make_engine(
        make_model(parts, remat=remat),
        loss_fn=flagged_loss,
        sample_batch=batch,
        optimizer=optax.sgd(0.0),
    )
    params = params_of(engine)
    hidden = batch["x"] @ params["embed"]["kernel"] + params["embed"]["bias"]
    want = np.mean(hidden @ params["head"]["kernel"] + params["head"]["bias"])
    assert float(engine.evaluate(batch)["loss"]) == pytest.approx(want, rel=1e-5)
    drawn = [float(engine.step(batch)["loss"]) for _ in range(2)]
    assert drawn[0] != pytest.approx(want, rel=1e-3)
    assert drawn[0] != drawn[1], "a step draws masks of its own"


def test_evaluation_equals_the_plain_model():
    engine = make_engine(make_model())
    got = engine.evaluate(BATCHES[1])
    want = plain_loss(params_of(engine), BATCHES[1])
    assert float(got["loss"]) == pytest.approx(float(want), rel=1e-5)


def test_model_out_of_the_engine_can_be_called():
    engine = make_engine(make_model(LINEN, tied=TIE))
    tokens = BATCHES[0]["tokens"]
    np.testing.assert_allclose(
        jax.jit(engine.model().__call__)(tokens),
        plain_logits(params_of(engine), tokens),
        rtol=1e-4,
        atol=1e-5,
    )


def test_loss_of_a_model_in_parts_may_have_metrics():
    def with_metric(model, batch):
        return loss_fn(model, batch), {"grade/a": jnp.float32(3)}

    metrics = make_engine(make_model(), loss_fn=with_metric).step(BATCHES[0])
    assert float(metrics["grade/a"]) == 3
