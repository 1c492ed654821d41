"""Which leaves of real models decay, and what does a mask by dims get wrong?"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpar
from jaxpar.models import VitConfig, decoder_config, make_decoder, make_vit
from jaxpar.optim import decayed, fused_adamw
from jaxpar.tree import named_leaves

TOKENS = jnp.zeros((8, 9), int)
CONFIG = decoder_config("tiny", num_layers=2, width=16, seq_len=8, norm="layernorm")


def test_kernels_and_tables_decay_and_norms_and_biases_do_not():
    params = make_decoder(CONFIG).init(0, TOKENS).params
    found = named_leaves(decayed(params))
    kept = {name for name, is_decayed in found.items() if not is_decayed}
    assert kept == {name for name in found if name.endswith(("scale", "bias"))}
    assert found["blocks/attention/query/kernel"]
    assert found["embed/embedding/table"]
    assert params["blocks"]["mlp_norm"]["scale"].ndim == 2, "what misleads ndim > 1"


def test_class_tokens_positions_and_foreign_norms():
    config = VitConfig(image_size=8, patch_size=4, num_layers=1, num_heads=1, width=4)
    params = make_vit(config).init(0, jnp.zeros((1, 8, 8, 3))).params
    found = named_leaves(decayed(params))
    assert found["embed/class_token"]
    assert found["embed/positions"]
    leaf = {"weight": jnp.ones((2, 3))}
    foreign = {"ln_1": leaf, "RMSNorm_0": leaf, "lnear": leaf}
    by_module = {name: list(leaf.values()) for name, leaf in decayed(foreign).items()}
    assert by_module == {"ln_1": [False], "RMSNorm_0": [False], "lnear": [True]}


@pytest.mark.parametrize("make", [optax.adamw, fused_adamw])
def test_an_engine_takes_it_as_the_mask(make):
    """Without gradients only what decays moves."""
    engine = jaxpar.initialize(
        model=make_decoder(CONFIG),
        loss_fn=lambda model, batch: 0.0 * model(batch["tokens"]).mean(),
        optimizer=make(0.1, weight_decay=0.5, mask=decayed),
        sample_batch={"tokens": np.zeros((8, 8), np.int32)},
        mesh=jaxpar.MeshShape(data=4, tensor=2),
        zero=3,
        check_loss=False,
    )
    before = named_leaves(jax.device_get(engine.state.params))
    engine.step({"tokens": np.zeros((8, 8), np.int32)})
    after = named_leaves(jax.device_get(engine.state.params))
    for name, is_decayed in named_leaves(decayed(engine.state.params)).items():
        factor = 0.95 if is_decayed else 1.0
        np.testing.assert_allclose(after[name], factor * before[name], rtol=1e-5)
