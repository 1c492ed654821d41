"""What does a small sharded training state look like, and a slow or full disk?"""

import dataclasses
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar.checkpoint import manifest


@pytest.fixture
def mesh() -> Mesh:
    return jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))


@pytest.fixture
def tree(mesh: Mesh) -> dict[str, Any]:
    kernel = jnp.arange(64.0).reshape(16, 4)
    return {
        "params": {"kernel": jax.device_put(kernel, NamedSharding(mesh, P("data")))},
        "step": jax.device_put(jnp.int32(7), NamedSharding(mesh, P())),
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def bits() -> Callable[[Any], list[bytes]]:
    """Give a tree's values as bytes, so that NaN equals NaN and 0.0 is not -0.0."""

    def of(tree: Any) -> list[bytes]:
        leaves = jax.tree.leaves(tree)
        keys = [jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) for leaf in leaves]
        return [
            np.asarray(jax.random.key_data(leaf) if key else leaf).tobytes()
            for leaf, key in zip(leaves, keys, strict=True)
        ]

    return of


@dataclasses.dataclass
class Disk:
    """A disk whose writes wait for `release`, or fail once `full` is set."""

    release: threading.Event
    full: bool = False


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    disk = Disk(threading.Event())
    disk.release.set()
    write = manifest.write_whole

    def slow_write(path: Path, text: bytes, **options: bool) -> None:
        assert disk.release.wait(30)
        if disk.full:
            raise OSError(28, "No space left on device")
        write(path, text, **options)

    monkeypatch.setattr(manifest, "write_whole", slow_write)
    yield disk
    disk.release.set()
