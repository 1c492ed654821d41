"""Which dims of a TPU slice's torus make up a mesh axis?

Over many chips at once XLA:TPU makes all-reduces of gathers and reduce-scatters, which
move two to three times the bytes; along one dim of the torus after the other they are
native (libtpu 0.0.48; benchmarks/compiled_tpu.py).
"""

import functools

import numpy as np
from jax.sharding import Mesh

FEWEST = 16
"""Chips on an axis below which collectives over it are run at once."""


@functools.cache
def torus_dims(mesh: Mesh, axis: str) -> tuple[int, ...]:
    """Split a mesh axis into dims of the torus.

    Args:
      mesh: the mesh.
      axis: one of its axes.

    Returns:
      The sizes of the dims, the outermost first: an index on the axis is a number with
      these digits, each of which moves along one dim of the torus alone. Empty if it
      has none, is a single dim, or has less than `FEWEST` chips.
    """
    devices = np.moveaxis(mesh.devices, mesh.axis_names.index(axis), -1)
    lines = devices.reshape(-1, devices.shape[-1])
    # GPUs to compile for have coordinates, too.
    if lines.shape[1] < FEWEST or lines.flat[0].platform != "tpu":
        return ()
    return dims_of(np.array([[device.coords for device in line] for line in lines]))


def dims_of(coords: np.ndarray) -> tuple[int, ...]:
    """The dims that coordinates run through, digit by digit; see `torus_dims`.

    Args:
      coords: [lines, n, dims]: of the chips along an axis, by the place on the others.
    """
    found = {_digits(line) for line in coords}
    (sizes,) = found if len(found) == 1 else ((),)
    return sizes if len(sizes) > 1 else ()


def groups_along(sizes: tuple[int, ...], dim: int) -> list[list[int]]:
    """The groups of indices that differ in one digit.

    Args:
      sizes: of the dims, the outermost first.
      dim: which digit.

    Example:
      >>> groups_along((2, 3), 0)
      [[0, 3], [1, 4], [2, 5]]
      >>> groups_along((2, 3), 1)
      [[0, 1, 2], [3, 4, 5]]
    """
    indices = np.arange(np.prod(sizes)).reshape(sizes)
    return np.moveaxis(indices, dim, -1).reshape(-1, sizes[dim]).tolist()


def _digits(coords: np.ndarray) -> tuple[int, ...]:
    """The dims that coordinates [n, 3] run through in turn; empty if they don't."""
    moves, sizes, stride, count = coords - coords[0], [], 1, len(coords)
    while stride < count:
        (along,) = np.nonzero(moves[stride])[:1]
        if len(along) != 1:
            return ()
        others = np.delete(moves[::stride], along[0], axis=1)
        leaves = np.nonzero(np.any(others != 0, axis=1))[0]
        size = int(leaves[0]) if len(leaves) else count // stride
        sizes.append(size)
        stride *= size
    sizes = tuple(reversed(sizes))
    if np.prod(sizes) != count:
        return ()
    digits = np.stack(np.unravel_index(np.arange(count), sizes), axis=1)
    strides = [int(np.prod(sizes[at + 1 :])) for at in range(len(sizes))]
    steps = sum(moves[digits[:, at] * strides[at]] for at in range(len(sizes)))
    return sizes if np.array_equal(steps, moves) else ()
