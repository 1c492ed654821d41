"""Is the GPT in parts the GPT: the same losses, bit for bit, on one stage?"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxpar
from jaxpar.models import GPT, GPTConfig, gpt_loss, pipeline_gpt
from jaxpar.models.gpt.pipeline import as_gpt
from tests.model.toys import make_engine, params_of

TOKENS = np.random.default_rng(0).integers(0, 32, (2, 8, 9)).astype(np.int32)
SHAPE = {"vocab_size": 32, "seq_len": 8, "num_layers": 2, "num_heads": 2, "width": 16}
CONFIGS = {
    "gpt2": GPTConfig(**SHAPE),
    "llama": GPTConfig(
        **SHAPE,
        positions="rotary",
        norm="rmsnorm",
        activation="swiglu",
        bias=False,
        tied_embedding=False,
    ),
}


def in_parts(params: dict) -> dict:
    """A GPT's parameters, where those of its parts lie."""
    embed = {k: params[k] for k in ("embedding", "positions") if k in params}
    head = {"final_norm": params["final_norm"]}
    if "head" in params:
        head["kernel"] = params["head"]
    return {"embed": embed, "blocks": {"block": params["blocks"]}, "head": head}


def gpt_engine(model) -> jaxpar.Engine:
    return make_engine(
        model, loss_fn=gpt_loss, sample_batch={"tokens": TOKENS[0]}, accumulate=2
    )


def losses_from(engine: jaxpar.Engine, params: dict) -> list[float]:
    """Losses of two steps that start from these parameters."""
    placed = jax.tree.map(
        lambda new, old: jax.device_put(new, old.sharding), params, engine.state.params
    )
    state, losses = dataclasses.replace(engine.state, params=placed), []
    for tokens in TOKENS:
        state, metrics = engine.train_step(state, {"tokens": tokens})
        losses.append(float(metrics["loss"]))
    return losses


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_parts_of_the_gpt_train_as_the_gpt_bit_for_bit(name):
    config = CONFIGS[name]
    whole = gpt_engine(lambda rngs: GPT(config, rngs=rngs))
    params = params_of(whole)
    parts = gpt_engine(pipeline_gpt(config))
    want = losses_from(whole, params)
    assert losses_from(parts, in_parts(params)) == want
    assert want[0] != want[1]


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("name", CONFIGS)
def test_as_gpt_is_the_gpt_with_these_parameters(name, dropout):
    config = dataclasses.replace(CONFIGS[name], dropout=dropout)
    with nnx.use_eager_sharding(False):
        model = GPT(config, rngs=nnx.Rngs(3))
    model.eval()
    params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    again = as_gpt(config, in_parts(params))
    again.eval()
    own = nnx.to_pure_dict(nnx.state(again, nnx.Param))
    jax.tree.map(np.testing.assert_array_equal, own, params)
    tokens = jnp.asarray(TOKENS[0, :, :-1])
    np.testing.assert_array_equal(again(tokens), model(tokens))


def test_as_gpt_takes_what_an_engine_has_trained():
    config = CONFIGS["gpt2"]
    engine = make_engine(
        pipeline_gpt(config),
        loss_fn=gpt_loss,
        sample_batch={"tokens": TOKENS[0]},
        optimizer=optax.sgd(0.1),
    )
    tokens = jnp.asarray(TOKENS[0, :, :-1])
    np.testing.assert_allclose(
        as_gpt(config, engine.state.params)(tokens),
        engine.model()(tokens),
        rtol=1e-5,
        atol=1e-6,
    )
