"""How are rows multiplied, each by its expert's kernel?

Rows stand in tiles, each of one expert. XLA has `jax.lax.ragged_dot` for that: a kernel
of its own on TPUs, but on CPUs and GPUs a matmul of all rows with all experts (jax
0.11.2, compiled for an H200: E times the FLOPs). There the tiles are a loop.
"""

import functools
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from jaxpar.jaxprs.branches import expected
from jaxpar.jaxprs.device import device_kind
from jaxpar.mesh import TENSOR
from jaxpar.models.experts.slots import Tiles
from jaxpar.sharding.collectives import wire_dtype

Side = Literal["in", "out"]
"""The side of a kernel that tensor parallelism splits: dim 1 or dim 2."""


def rows_of_tile(choices: int, num_experts: int) -> int:
    """Choose a tile's rows: full tiles most of the time, and matmuls that are not thin.

    Args:
      choices: rows of all experts together.
      num_experts: E.

    Returns:
      A power of two from 8 to 512. An expert's last tile is half empty on average.
    """
    most = max(8, choices // (8 * num_experts))
    return min(512, 1 << (most.bit_length() - 1))


def fraction_used(choices: int, num_experts: int, num_tiles: int) -> float:
    """How many of the tiles have rows where all experts are chosen alike.

    Args:
      choices: rows of these experts together.
      num_experts: E.
      num_tiles: M.

    Returns:
      A fraction of the tiles; an expert's last one counts as half full.
    """
    tiles = choices / rows_of_tile(choices, num_experts) + num_experts / 2
    return min(1.0, tiles / num_tiles)


def grouped_matmul(
    x_MTD: Float[Array, "M T D"],
    kernel_EDF: Float[Array, "E D F"],
    tiles: Tiles,
    *,
    split: Side,
    used: float = 1.0,
) -> Float[Array, "M T F"]:
    """Multiply each tile's rows by its expert's kernel.

    Args:
      x_MTD: the tiles.
      kernel_EDF: a kernel for each expert.
      tiles: which expert each tile is of.
      split: the side of the kernel that the tensor axis splits.
      used: the fraction of the tiles that plans count as having rows; `fraction_used`.

    Returns:
      The products; zeros for tiles without rows.

    Source: Gale et al., "MegaBlocks" (2022), for tiles of one expert each.
    """
    if "TPU" in device_kind():
        with expected(used):
            return _ragged(x_MTD, kernel_EDF, tiles)
    return _by_tiles(split, used, x_MTD, kernel_EDF, tiles.experts, tiles.is_used)


def _ragged(x_MTD: jax.Array, kernel_EDF: jax.Array, tiles: Tiles) -> jax.Array:
    M, T, D = x_MTD.shape
    experts = jnp.arange(kernel_EDF.shape[0])
    own_ME = (tiles.experts[:, None] == experts) & tiles.is_used[:, None]
    sizes_E = T * own_ME.sum(0, dtype=jnp.int32)
    product = jax.lax.ragged_dot(x_MTD.reshape(M * T, D), kernel_EDF, sizes_E)
    return product.reshape(M, T, -1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _by_tiles(
    split: Side,
    used: float,
    x_MTD: jax.Array,
    kernel_EDF: jax.Array,
    expert_M: jax.Array,
    is_used_M: jax.Array,
) -> jax.Array:
    return _products(split, used, x_MTD, kernel_EDF, expert_M, is_used_M)


def _forward(split: Side, used: float, *given: jax.Array) -> tuple[jax.Array, tuple]:
    return _by_tiles(split, used, *given), given


def _backward(split: Side, used: float, saved: tuple, grad_MTF: jax.Array) -> tuple:
    x_MTD, kernel_EDF, *of_tiles = saved
    other: Side = "out" if split == "in" else "in"
    transposed_EFD = kernel_EDF.transpose(0, 2, 1)
    grad_x = _products(other, used, grad_MTF, transposed_EFD, *of_tiles)
    grad_kernel = _sums(split, used, x_MTD, grad_MTF, kernel_EDF, *of_tiles)
    return grad_x, grad_kernel, None, None


_by_tiles.defvjp(_forward, _backward)


def _products(
    split: Side,
    used: float,
    x_MTD: jax.Array,
    kernel_EDF: jax.Array,
    expert_M: jax.Array,
    is_used_M: jax.Array,
) -> jax.Array:
    """Each tile's product with its expert's kernel."""
    is_split = _splits(kernel_EDF.shape[1 if split == "in" else 2])

    def own(x_MTD, kernel_EDF, expert_M, is_used_M):
        def of_tile(tile):
            rows, expert, is_used = tile
            return _if(is_used, used, lambda: rows @ kernel_EDF[expert])

        product = jax.lax.map(of_tile, (x_MTD, expert_M, is_used_M))
        if not is_split or split == "out":
            return product
        wide = product.astype(wire_dtype(product.dtype, device_kind()))
        return jax.lax.psum(wide, TENSOR).astype(product.dtype)

    of_x, of_kernel = P(None, None, TENSOR), P(None, TENSOR)
    of_product = P()
    if split == "out":
        of_x, of_kernel, of_product = P(), P(None, None, TENSOR), P(None, None, TENSOR)
    specs = (of_x, of_kernel, P(), P())
    call = _on_tensor(own, specs, of_product) if is_split else own
    return call(x_MTD, kernel_EDF, expert_M, is_used_M)


def _sums(
    split: Side,
    used: float,
    x_MTD: jax.Array,
    grad_MTF: jax.Array,
    like_EDF: jax.Array,
    expert_M: jax.Array,
    is_used_M: jax.Array,
) -> jax.Array:
    """The kernels' gradients: sums over their tiles, in fp32."""
    is_split = _splits(like_EDF.shape[1 if split == "in" else 2])
    wide = jnp.promote_types(like_EDF.dtype, jnp.float32)

    def own(x_MTD, grad_MTF, expert_M, is_used_M):
        def add(total_EDF, tile):
            rows, grads, expert, is_used = tile

            def product() -> jax.Array:
                return jnp.matmul(rows.T, grads, preferred_element_type=wide)

            return total_EDF.at[expert].add(_if(is_used, used, product)), None

        sizes = like_EDF.shape[0], x_MTD.shape[2], grad_MTF.shape[2]
        tiles = x_MTD, grad_MTF, expert_M, is_used_M
        return jax.lax.scan(add, jnp.zeros(sizes, wide), tiles)[0]

    of_x, of_grad, of_sum = P(None, None, TENSOR), P(), P(None, TENSOR)
    if split == "out":
        of_x, of_grad, of_sum = P(), P(None, None, TENSOR), P(None, None, TENSOR)
    specs = (of_x, of_grad, P(), P())
    call = _on_tensor(own, specs, of_sum) if is_split else own
    return call(x_MTD, grad_MTF, expert_M, is_used_M).astype(like_EDF.dtype)


def _if(is_used: jax.Array, used: float, product: Callable[[], jax.Array]) -> jax.Array:
    """A tile's product, if it has rows; else zeros."""
    like = jax.eval_shape(product)
    with expected(used):
        return jax.lax.cond(is_used, product, lambda: jnp.zeros(like.shape, like.dtype))


def _splits(size: int) -> bool:
    """Whether the tensor axis splits a dim of such a size here."""
    mesh = jax.sharding.get_abstract_mesh()
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    ways = mesh.shape.get(TENSOR, 1)
    return ways > 1 and kinds[TENSOR] == AxisType.Auto and size % ways == 0


def _on_tensor(call: Callable, ins: tuple[P, ...], outs: P) -> Callable:
    # Mapped, or the compiler would sum each tile over the axis inside the loop.
    return jax.shard_map(
        call, in_specs=ins, out_specs=outs, axis_names={TENSOR}, check_vma=False
    )
