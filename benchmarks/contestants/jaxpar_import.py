"""Load a folder into parameters on one CPU device: FOLDER.

Prints a line of JSON: seconds, and the bytes that the process held at its most beside
the parameters.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.contestants.memory import Peak
from jaxpar import models


class Holder:
    """Takes parameters as an engine does, whose own hold no memory."""

    def __init__(self, like: Any):
        self.weights, self.state = (like, {}), self

    def load_params(self, params: Any) -> None:
        """Keep the parameters."""
        self.weights = jax.block_until_ready(params), {}


def main() -> None:
    """Load, and say how long it took."""
    jax.config.update("jax_platforms", "cpu")
    ours = models.from_huggingface(sys.argv[1])
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    tokens = jax.ShapeDtypeStruct((1, 8), jnp.int32)
    shapes = jax.eval_shape(lambda: ours.model.init(0, tokens).params)
    like = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), shapes
    )
    holder = Holder(like)
    jax.block_until_ready(jnp.ones((64, 64)) @ jnp.ones((64, 64)))
    peak, began = Peak(), time.perf_counter()
    ours.load(holder)
    seconds = time.perf_counter() - began
    held = sum(x.nbytes for x in jax.tree.leaves(holder.weights))
    print(json.dumps({"seconds": seconds, "beside": peak.most - peak.first - held}))


if __name__ == "__main__":
    main()
