"""Does a model train alike with its blocks' inputs in host memory, on any mesh?"""

from typing import Any

import jax
import numpy as np
import optax
import pytest

import jaxpar
from jaxpar.models import DecoderConfig, decoder_loss, make_decoder
from jaxpar.models.t5 import T5Config, make_t5, t5_loss

WIDTH, VOCAB, LENGTH, ROWS = 32, 64, 16, 8
DRAWN = np.random.default_rng(0).integers(1, VOCAB, (ROWS, LENGTH + 1), np.int32)


def decoder(remat: str) -> dict[str, Any]:
    config = DecoderConfig(
        num_layers=4,
        num_heads=2,
        width=WIDTH,
        seq_len=LENGTH,
        vocab_size=VOCAB,
        dropout=0.1,
        remat=remat,
    )
    batch = {"tokens": DRAWN}
    return {"model": make_decoder(config), "loss_fn": decoder_loss, "batch": batch}


def t5(remat: str) -> dict[str, Any]:
    config = T5Config(
        num_layers=2,
        num_decoder_layers=2,
        num_heads=2,
        width=WIDTH,
        vocab_size=VOCAB,
        dropout=0.0,
        remat=remat,
    )
    batch = {"inputs": DRAWN[:, :LENGTH], "labels": DRAWN[:, :8]}
    return {"model": make_t5(config), "loss_fn": t5_loss, "batch": batch}


def engine_of(made: dict[str, Any], mesh: dict, **options: Any) -> jaxpar.Engine:
    shape = jaxpar.MeshShape(**mesh)
    count = int(np.prod(list(mesh.values())))
    return jaxpar.initialize(
        model=made["model"],
        loss_fn=made["loss_fn"],
        optimizer=optax.adamw(1e-2),
        sample_batch=made["batch"],
        mesh=jaxpar.make_mesh(shape, jax.devices()[:count]),
        **options,
    )


def moved_to_host(engine: jaxpar.Engine) -> int:
    """Operations of the step that move an array to the host's memory."""
    (traced,) = engine.traces().values()
    return str(traced.jaxpr).count("devices=(MemorySpace.Host,)")


def slow(*case: Any) -> Any:
    return pytest.param(*case, marks=pytest.mark.thorough)


@pytest.mark.parametrize(
    ("make", "mesh", "options"),
    [
        slow(decoder, {"data": 1}, {"zero": 1}),
        (decoder, {"data": 2, "tensor": 2}, {"zero": 3}),
        slow(decoder, {"data": 4, "tensor": 2}, {"zero": 1, "prefetch": True}),
        slow(decoder, {"data": 2, "pipe": 2}, {"zero": 1, "accumulate": 2}),
        slow(decoder, {"data": 4}, {"zero": 2, "accumulate": 2, "precision": "bf16"}),
        slow(t5, {"data": 2}, {"zero": 1}),
    ],
    ids=lambda x: getattr(x, "__name__", str(x)),
)
def test_trains_as_with_full_remat(make: Any, mesh: dict, options: dict) -> None:
    losses, moved = {}, {}
    for remat in ("full", "offload"):
        made = make(remat)
        engine = engine_of(made, mesh, **options)
        moved[remat] = moved_to_host(engine)
        losses[remat] = [float(engine.step(made["batch"])["loss"]) for _ in range(4)]
    np.testing.assert_allclose(losses["offload"], losses["full"], rtol=1e-6)
    assert moved["offload"] > moved["full"] == 0


def test_an_encoders_output_is_not_stored_for_every_block() -> None:
    made = t5("offload")
    # One input of the encoder's block and one of the decoder's, each in a loop.
    assert moved_to_host(engine_of(made, {"data": 1}, zero=1)) == 2
