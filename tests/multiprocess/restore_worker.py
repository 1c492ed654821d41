"""One process of several that restore: prints the most memory that it took.

    python -m tests.multiprocess.restore_worker SPEC

SPEC is JSON: what `tests.multiprocess.worker.join` takes, and ``folder``.
"""

import json
import sys
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxpar
from jaxpar.checkpoint import Checkpoints
from tests.memory import most_bytes
from tests.multiprocess.worker import join

LEAVES, ROWS, WIDTH = 10, 4096, 4096
LEAF_BYTES = 4 * ROWS * WIDTH


def main(spec: dict[str, Any]) -> None:
    join(spec)
    sharding = NamedSharding(jaxpar.make_mesh(jaxpar.MeshShape(data=-1)), P("data"))
    leaf = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32, sharding=sharding)
    before = most_bytes()
    target = {f"w{i}": leaf for i in range(LEAVES)}
    restored = Checkpoints(spec["folder"]).restore(target)
    taken = most_bytes() - before
    for i in range(LEAVES):
        for shard in restored.tree[f"w{i}"].addressable_shards:
            assert bool((shard.data == i).all()), "what was saved"
    print(f"taken {taken}")


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
