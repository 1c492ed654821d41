"""Is the GPT's loss, by its head, that of its logits?"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.losses import next_token_loss
from jaxpar.models import DecoderConfig, decoder_loss, make_decoder

RNG = np.random.default_rng(0)
SHAPE = {"vocab_size": 48, "seq_len": 12, "num_layers": 2, "num_heads": 2, "width": 16}
SEGMENTS = np.repeat([[1, 1, 1, 1, 2, 2, 2, 3, 3, 3, 3, 0, 0]], 2, axis=0)
BATCH = {
    "tokens": RNG.integers(0, 48, size=(2, 13)),
    "weights": RNG.random((2, 12)).astype(np.float32),
}
PACKED = BATCH | {"segment_ids": SEGMENTS, "positions": np.tile(np.arange(13), (2, 1))}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("batch", [BATCH, PACKED], ids=["windows", "packs"])
def test_loss_of_the_head_is_that_of_its_logits(tied: bool, batch: dict):
    config = DecoderConfig(**SHAPE, tied_embedding=tied)
    model = make_decoder(config).init(0, jnp.zeros((2, 12), int))
    batch = jax.tree.map(jnp.asarray, batch)

    def mean(params: dict, loss_fn: object) -> jax.Array:
        loss = loss_fn(model.with_params(params), batch)
        return loss.total / loss.weight

    of_both = [
        jax.value_and_grad(lambda p, f=f: mean(p, f))(model.params)
        for f in (decoder_loss, next_token_loss)
    ]
    (own, grads), (wanted, expected) = of_both
    assert float(own) == pytest.approx(float(wanted), rel=1e-6)
    for found, other in zip(*map(jax.tree.leaves, (grads, expected)), strict=True):
        np.testing.assert_allclose(found, other, rtol=1e-4, atol=1e-6)
