"""Are batches refused whose values are not rows? (Others: test_asynchronous.py)"""

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxpar
from tests.equivalence.delays import loss_fn, make_batches, make_model


def test_replicated_values_are_refused():
    batch = {**make_batches(16, 1)[0], "scale": jaxpar.Replicated(jnp.float32(1))}
    with pytest.raises(ValueError, match=r"'scale' is jaxpar\.Replicated.*1f1b"):
        jaxpar.initialize(
            model=make_model(4, tied=True, remat="none"),
            loss_fn=loss_fn,
            optimizer=optax.sgd(0.1),
            sample_batch=batch,
            mesh=jaxpar.make_mesh(jaxpar.MeshShape(data=2, pipe=2), jax.devices()[:4]),
            accumulate=2,
            schedule="pipedream_2bw",
        )
