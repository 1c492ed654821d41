"""One process of a run that saves twice; the second save's files can't be read in one.

    python -m tests.multiprocess.sealing_worker SPEC OUT

SPEC is as for `tests.multiprocess.worker`; the first case says where to save. OUT gets
by name the bytes of each file of the first save that this process has hashed; whether
the restored arrays equal the saved ones; and the error of the second save.
"""

import errno
import json
import os
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxpar
from jaxpar.checkpoint import Checkpoints, SaveFailedError, sealing
from jaxpar.checkpoint.manifest import Entry, seal_files
from tests.multiprocess.worker import Case, join

ROWS, WIDTH = 64, 1024


class Hashing:
    """Hashes files as jaxpar does, and keeps their bytes, or fails."""

    def __init__(self):
        self.sizes: dict[str, int] = {}
        self.fails = False

    def __call__(self, folder: Path, names: list[str]) -> dict[str, Entry]:
        if self.fails:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        found = seal_files(folder, names)
        self.sizes |= {name: size for name, (size, _) in found.items()}
        return found


def make_tree() -> dict[str, jax.Array]:
    mesh = jaxpar.make_mesh(jaxpar.MeshShape(data=-1))
    make = jax.jit(
        lambda: jnp.arange(ROWS * WIDTH, dtype=jnp.float32).reshape(ROWS, WIDTH),
        out_shardings=NamedSharding(mesh, P("data")),
    )
    return {"w": make()}


def run(folder: str) -> dict[str, Any]:
    tree, hashing = make_tree(), Hashing()
    sealing.seal_files = hashing
    checkpoints = Checkpoints(folder)
    checkpoints.save(1, tree)
    checkpoints.wait()
    sizes = dict(hashing.sizes)
    restored = checkpoints.restore(tree)
    pairs = zip(
        tree["w"].addressable_shards,
        restored.tree["w"].addressable_shards,
        strict=True,
    )
    is_same = all(np.array_equal(old.data, new.data) for old, new in pairs)
    hashing.fails = jax.process_index() == 1
    checkpoints.save(2, tree)
    try:
        checkpoints.close()
        said = "none"
    except SaveFailedError as error:
        said = str(error)
    return {"sizes": sizes, "is_same": is_same, "said": said}


if __name__ == "__main__":
    spec = json.loads(sys.argv[1])
    join(spec)
    cases = [Case(**case) for case in spec["cases"]]
    result = [run(case.save) for case in cases if case.save]
    Path(sys.argv[2]).write_text(json.dumps(result), encoding="utf-8")
