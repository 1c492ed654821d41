"""Does a CNN of Flax learn a folder of PNGs, on two data shards as on one device?

The two runs' losses and parameters differ by rounding in fp32: 1e-5 relative.
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from PIL import Image

import jaxpar
from jaxpar.data import ImageFolder, Loader
from jaxpar.tree import named_leaves

SIZE, STEPS = 8, 12


class Net(nnx.Module):
    """One convolution, and the mean over places."""

    def __init__(self, rngs: nnx.Rngs):
        self.conv = nnx.Conv(3, 16, (3, 3), rngs=rngs)
        self.out = nnx.Linear(16, 3, rngs=rngs)

    def __call__(self, image_BHWC: jax.Array) -> jax.Array:
        x_BHWC = nnx.relu(self.conv(image_BHWC.astype(jnp.float32) / 255))
        return self.out(x_BHWC.mean((1, 2)))


def loss_fn(model: Net, batch: dict) -> jax.Array:
    logits = model(batch["image"])
    return optax.softmax_cross_entropy_with_integer_labels(
        logits, batch["label"]
    ).mean()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Noise that is brighter in one channel, which is the class."""
    rng = np.random.default_rng(0)
    for channel, name in enumerate(("red", "green", "blue")):
        (tmp_path / name).mkdir()
        for index in range(12):
            pixels = rng.integers(0, 120, (SIZE + index, SIZE, 3), dtype=np.uint8)
            pixels[..., channel] += 120
            Image.fromarray(pixels).save(tmp_path / name / f"{index}.png")
    return tmp_path


def train(folder: Path, num_devices: int) -> tuple[list[float], dict[str, np.ndarray]]:
    loader = Loader(ImageFolder(folder, size=SIZE), batch_size=12)
    engine = jaxpar.initialize(
        model=lambda rngs: Net(rngs),
        loss_fn=loss_fn,
        optimizer=optax.adam(0.03),
        sample_batch=loader.sample_batch,
        mesh=jaxpar.make_mesh(
            jaxpar.MeshShape(data=num_devices), jax.devices()[:num_devices]
        ),
        zero=3,
    )
    losses = [float(engine.step(next(loader))["loss"]) for _ in range(STEPS)]
    return losses, named_leaves(jax.device_get(engine.state.params))


def test_folder_of_images_trains_on_two_shards_as_on_one_device(folder: Path):
    losses, params = train(folder, 1)
    again, shared = train(folder, 2)
    assert losses[-1] < 0.6 * losses[0]
    np.testing.assert_allclose(again, losses, rtol=1e-5)
    for name, leaf in params.items():
        error = np.linalg.norm(shared[name] - leaf)
        assert error < 1e-5 * np.linalg.norm(leaf), name
