"""Does a GPT that shards tokens over tensor train alike in a pipeline?"""

import jax
import numpy as np
import optax
import pytest

import jaxpar
from jaxpar.models import DecoderConfig, decoder_loss, make_decoder

ROWS, LENGTH, VOCAB = 8, 16, 64


def losses_of(mesh: jaxpar.MeshShape, *, sequence_parallel: bool) -> list[float]:
    config = DecoderConfig(
        num_layers=4,
        num_heads=4,
        width=32,
        vocab_size=VOCAB,
        seq_len=LENGTH,
        sequence_parallel=sequence_parallel,
    )
    shape = (ROWS, LENGTH + 1)
    batch = {"tokens": np.random.default_rng(0).integers(0, VOCAB, shape, np.int32)}
    devices = jax.devices()[: mesh.data * mesh.pipe * mesh.tensor]
    engine = jaxpar.initialize(
        model=make_decoder(config),
        loss_fn=decoder_loss,
        optimizer=optax.adamw(1e-2),
        sample_batch=batch,
        mesh=jaxpar.make_mesh(mesh, devices),
        zero=1,
        accumulate=2,
    )
    losses = [float(engine.step(batch)["loss"]) for _ in range(3)]
    return [*losses, float(engine.evaluate(batch)["loss"])]


@pytest.mark.slow
def test_sequence_parallel_stages_train_like_one_device():
    right = losses_of(jaxpar.MeshShape(data=1), sequence_parallel=False)
    mesh = jaxpar.MeshShape(data=2, pipe=2, tensor=2)
    found = losses_of(mesh, sequence_parallel=True)
    assert found == pytest.approx(right, rel=1e-5)
    assert right[-1] < right[0]
