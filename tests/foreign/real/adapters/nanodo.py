"""google-deepmind/nanodo: a GPT with a masked mean."""

from typing import Any

import jax
import numpy as np
import optax

from jaxpar import Weighted
from tests.foreign.real.checkouts import Checkouts
from tests.foreign.real.programs import ROWS, Program

NANODO = "google-deepmind/nanodo"


def gpt(checkouts: Checkouts) -> Program:
    """A GPT with remat, whose parameters are marked for an axis "data"."""
    models = checkouts.load(NANODO, ".", "nanodo.model")
    data = checkouts.pick(NANODO, "nanodo/data.py", "PAD_ID", "get_in_out")
    train = checkouts.pick(
        NANODO, "nanodo/loss.py", "LossAuxData", "get_default_loss_fn"
    )
    train.data = data

    def masked_mean(model: Any, batch: dict) -> tuple[jax.Array, jax.Array]:
        def apply_fn(_: Any, tokens: jax.Array, mutable: Any) -> tuple:
            return model(tokens), {}

        value, aux = train.get_default_loss_fn(batch["tokens"], apply_fn, {})({})
        return value, aux.ntokens

    def weighted(model: Any, batch: dict) -> Weighted:
        value, ntokens = masked_mean(model, batch)
        return Weighted(value * ntokens, ntokens)

    def make_batch(rng: np.random.Generator) -> dict:
        tokens = rng.integers(1, 64, (ROWS, 16), dtype=np.int32)
        lengths = rng.integers(4, 17, (ROWS, 1))
        return {"tokens": np.where(np.arange(16) < lengths, tokens, 0)}

    sizes = {"D": 32, "H": 4, "L": 16, "N": 2, "V": 64, "F": 64}
    config = models.DoConfig(**sizes, fsdp_enabled=True, remat=True)
    return Program(
        models.TransformerDo(config),
        lambda model, batch: masked_mean(model, batch)[0],
        optax.adamw(1.6e-3, b1=0.9, b2=0.98, eps=1e-9, weight_decay=0.1),
        make_batch,
        loss_fn=weighted,
    )
