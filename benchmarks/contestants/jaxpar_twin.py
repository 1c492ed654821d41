"""A family's model by jaxpar: FAMILY FOLDER DEVICES."""

import sys
from pathlib import Path
from typing import Any

import jax
import optax

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import jaxpar
from benchmarks.contestants import protocol, twin_models
from jaxpar import models


def make_engine(name: str, folder: str, batch: Any, devices: int) -> jaxpar.Engine:
    """The engine, with the folder's parameters."""
    jax.config.update("jax_platforms", "cpu")
    how = {
        "optimizer": optax.adamw(protocol.LEARNING_RATE, weight_decay=1e-4),
        "sample_batch": batch,
        "mesh": jaxpar.MeshShape(data=devices),
        "devices": jaxpar.cpu_devices(devices),
        "zero": 0,
    }
    if not twin_models.TWINS[name].name:
        model = models.make_coatnet(twin_models.coatnet())
        return jaxpar.initialize(model=model, loss_fn=models.classification_loss, **how)
    # Whole loops of layers are faster where one device has both cores.
    unroll: dict[str, Any] = {"unroll": twin_models.LAYERS} if devices == 1 else {}
    ours = models.from_huggingface(folder, **unroll if name != "gemma2" else {})
    engine = jaxpar.initialize(model=ours.model, loss_fn=ours.loss_fn, **how)
    ours.load(engine)
    return engine


def main() -> None:
    """Serve steps."""
    name, folder, devices = sys.argv[1:]
    data = twin_models.batches(name)
    engine = make_engine(name, folder, data[0], int(devices))
    float(engine.step(data[0])["loss"])

    protocol.serve(lambda step: engine.step(data[step % len(data)])["loss"])


if __name__ == "__main__":
    main()
