"""Restores a checkpoint; each process notes the most memory that this took.

jaxpar launch local --processes 2 --out RUN tests/multiprocess/restore_script.py
"""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxpar
from jaxpar.checkpoint import Checkpoints
from jaxpar.cli.recipe_flags import parse
from tests.memory import most_bytes

LEAVES, ROWS, WIDTH = 10, 4096, 4096
LEAF_BYTES = 4 * ROWS * WIDTH


@dataclasses.dataclass(frozen=True)
class Config:
    """A restore."""

    out: Path
    """The run's folder, with the checkpoint."""


def main(config: Config) -> None:
    sharding = NamedSharding(jaxpar.make_mesh(jaxpar.MeshShape(data=-1)), P("data"))
    leaf = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32, sharding=sharding)
    before = most_bytes()
    target = {f"w{i}": leaf for i in range(LEAVES)}
    restored = Checkpoints(config.out).restore(target)
    taken = most_bytes() - before
    for i in range(LEAVES):
        for shard in restored.tree[f"w{i}"].addressable_shards:
            assert bool((shard.data == i).all()), "what was saved"
    path = config.out / f"taken-{jax.process_index()}"
    path.write_text(str(taken), encoding="utf-8")


if __name__ == "__main__":
    main(parse(Config, __doc__))
