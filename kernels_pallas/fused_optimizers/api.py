"""What do users call: an optimizer's step on a bucket, with checked arguments."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas.backend import Choice, choose
from kernels_pallas.fused_optimizers import reference
from kernels_pallas.fused_optimizers.leaves import Leaves
from kernels_pallas.fused_optimizers.rules import Exact, Rule
from kernels_pallas.fused_optimizers.tiles import (
    SQUARES,
    TILE,
    Quantized,
    advance,
    as_coded,
    code_of,
    descend,
    from_coded,
    step,
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Numbers:
    """The numbers of one step; scalars on the device, or Python's.

    Attributes:
      learning_rate: at this step.
      count: number of the step, from 1.
      factor: on the gradients: one over the loss scale, times the clipping factor.
      applied: whether the step is applied; otherwise nothing changes.
    """

    learning_rate: Any
    count: Any
    factor: Any = 1.0
    applied: Any = True


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Updated:
    """The bucket after a step.

    Attributes:
      params: [elements], in fp32.
      moments: by name.
      copies: the parameters in the dtype of the given copies; None without.
    """

    params: Any
    moments: dict[str, Any]
    copies: Any


def fused_update(
    rule: Rule,
    params: jax.Array,
    grads: jax.Array,
    moments: Mapping[str, jax.Array | Quantized],
    numbers: Numbers,
    *,
    decays: jax.Array | np.ndarray | float = 0.0,
    copies: jax.Array | None = None,
    leaves: Leaves | None = None,
    implementation: Choice | None = None,
    interpret: Any = None,
) -> Updated:
    """Take an optimizer's step on a bucket of parameters, in one pass.

    Unscales and clips the gradients, updates the moments, decays the weights, updates
    the parameters and rounds a copy. On a Hopper GPU this is one kernel (two with trust
    ratios), which updates its arguments in place if the program donates them. A bucket
    consists of full tiles of `TILE` elements, each of one leaf and padded with zeros,
    which stay zero.

    Args:
      rule: the optimizer.
      params: fp32, [elements].
      grads: of any floating dtype, [elements].
      moments: fp32 [elements], or in 8 bits, by the rule's names; see `init_moments`.
      numbers: of the step.
      decays: the weight decay, or each tile's; fp32, [tiles].
      copies: the parameters in the compute dtype, [elements], to be overwritten; None
        for no copies.
      leaves: the leaf of each tile; needed for trust ratios, otherwise ignored.
      implementation: the name of one; None for the fastest that runs here.
      interpret: for the kernels on a CPU: ``plgpu.InterpretGPUParams()``.

    Returns:
      The bucket after the step.

    Raises:
      ValueError: if an array has a wrong shape or dtype, or the requested
        implementation is unknown or does not run here.

    Example:
      >>> from kernels_pallas.fused_optimizers import AdamW, init_moments
      >>> rule, params = AdamW(), jnp.ones(TILE)
      >>> moments = init_moments(rule, params.size)
      >>> new = fused_update(rule, params, params, moments, Numbers(0.25, count=1))
      >>> round(float(new.params[0]), 4)
      0.75
    """
    _check(rule, params, grads, moments, numbers, decays, copies, leaves)
    num_tiles = params.size // TILE
    if not num_tiles:  # A GPU has no empty launch.
        return Updated(params, dict(moments), copies)
    corrections = rule.corrections(jnp.asarray(numbers.count, jnp.int32))
    applied = jnp.asarray(numbers.applied).astype(jnp.float32)
    of_step = (applied, numbers.factor, numbers.learning_rate, *corrections)
    packed = jnp.stack([jnp.asarray(x, jnp.float32) for x in of_step])
    given = {"decays": jnp.broadcast_to(jnp.asarray(decays, jnp.float32), num_tiles)}
    run = functools.partial(
        _implementation(implementation, interpret), interpret=interpret
    )
    last = {} if copies is None else {"copies": copies}
    if rule.trust_ratio:
        assert leaves is not None, "checked"
        reads = {**given, "grads": grads, "params": params}
        moved = run(advance, rule, packed, reads, _flat(moments), SQUARES)
        of_params, of_direction = (moved.pop(name) for name in SQUARES)
        given["ratios"] = _ratios(of_params, of_direction, leaves)
        changed = {"params": params, **last}
        written = moved | run(descend, rule, packed, {**given, **moved}, changed)
    else:
        changed = {"params": params, **_flat(moments), **last}
        written = run(step, rule, packed, {**given, "grads": grads}, changed)
    return Updated(
        params=written["params"],
        moments=_nested(written, rule),
        copies=written.get("copies"),
    )


def init_moments(
    rule: Rule, num_elements: int, *, bits: int = 32
) -> dict[str, jax.Array | Quantized]:
    """Make the moments of a bucket before its first step.

    Args:
      rule: the optimizer.
      num_elements: of the bucket; a multiple of `TILE`.
      bits: 32 or 8, per element.

    Raises:
      ValueError: for other bits, or elements that are not full tiles.
    """
    if bits not in (8, 32):
        raise ValueError(f"bits={bits} must be 32 (fp32), or 8 (codes).")
    _check_tiles("num_elements", num_elements)

    def zeros() -> jax.Array:
        """A separate array for each moment, so that a program can donate every one."""
        return jnp.zeros(num_elements, jnp.float32)

    if bits == 32:
        return {name: zeros() for name in rule.moments}
    return {name: quantize(name, zeros()) for name in rule.moments}


@functools.partial(jax.jit, static_argnames="name")
def quantize(name: str, moment: jax.Array) -> Quantized:
    """Round a moment to 8 bits.

    Args:
      name: of the moment; "nu" has no sign.
      moment: fp32, full tiles.

    Returns:
      Codes and scales; they survive `dequantize` and `quantize` unchanged.
    """
    coded = as_coded(name, moment, Exact()).reshape(-1, TILE)
    scales = jnp.max(jnp.abs(coded), axis=1)
    codes = code_of(name).encode(coded, scales[:, None])
    return Quantized(codes.reshape(-1), scales)


@functools.partial(jax.jit, static_argnames="name")
def dequantize(name: str, moment: Quantized) -> jax.Array:
    """Undo `quantize`, up to rounding; fp32."""
    codes, scales = moment.codes.reshape(-1, TILE), moment.scales[:, None]
    return from_coded(name, code_of(name).decode(codes, scales).reshape(-1))


def _implementation(asked: Choice | None, interpret: Any) -> Callable[..., Any]:
    if interpret is None and choose("fused optimizers", asked) == "reference":
        return reference.run
    # Some jax versions have no Mosaic GPU.
    from kernels_pallas.fused_optimizers import mosaic  # noqa: PLC0415

    return mosaic.run


def _ratios(of_params: jax.Array, of_direction: jax.Array, leaves: Leaves) -> jax.Array:
    """Each tile's ratio: its leaf's norm over its direction's, 1 where one is 0."""

    params, direction = map(jnp.sqrt, map(leaves.total, (of_params, of_direction)))
    is_zero = (params == 0) | (direction == 0)
    ratios = jnp.where(is_zero, 1.0, params / jnp.where(is_zero, 1.0, direction))
    return ratios[leaves.of_tiles]


def _flat(moments: Mapping[str, jax.Array | Quantized]) -> dict[str, jax.Array]:
    flat = {}
    for name, moment in moments.items():
        if isinstance(moment, Quantized):
            flat[f"{name}/codes"] = moment.codes
            flat[f"{name}/scales"] = moment.scales
        else:
            flat[name] = moment
    return flat


def _nested(flat: Mapping[str, jax.Array], rule: Rule) -> dict[str, Any]:
    return {
        name: flat[name]
        if name in flat
        else Quantized(flat[f"{name}/codes"], flat[f"{name}/scales"])
        for name in rule.moments
    }


def _check(
    rule: Rule,
    params: jax.Array,
    grads: jax.Array,
    moments: Mapping[str, jax.Array | Quantized],
    numbers: Numbers,
    decays: Any,
    copies: jax.Array | None,
    leaves: Leaves | None,
) -> None:
    _check_tiles("params", params.size)
    if tuple(moments) != rule.moments:
        raise ValueError(
            f"moments: {list(moments)} were given, but {type(rule).__name__} has "
            f"{list(rule.moments)}; make them with init_moments."
        )
    if isinstance(numbers.count, int) and numbers.count < 1:
        raise ValueError(f"count={numbers.count}: the first step is number 1.")
    _check_array("params", params, params.size, (jnp.float32,))
    _check_array("grads", grads, params.size)
    if copies is not None:
        _check_array("copies", copies, params.size)
    num_tiles = params.size // TILE
    for name, moment in moments.items():
        if isinstance(moment, Quantized):
            dtype = code_of(name).dtype
            codes, scales = f"moments[{name!r}].codes", f"moments[{name!r}].scales"
            _check_array(codes, moment.codes, params.size, (dtype,))
            _check_array(scales, moment.scales, num_tiles, (jnp.float32,))
        else:
            _check_array(f"moments[{name!r}]", moment, params.size, (jnp.float32,))
    if np.ndim(decays):
        _check_array("decays", decays, num_tiles)
    if rule.trust_ratio:
        _check_leaves(leaves, num_tiles)


def _check_array(
    argument: str, array: Any, size: int, dtypes: tuple[Any, ...] = ()
) -> None:
    if array.shape != (size,):
        raise ValueError(
            f"{argument}: has shape {array.shape}; this bucket needs ({size},)."
        )
    if not (
        array.dtype in dtypes if dtypes else jnp.issubdtype(array.dtype, jnp.floating)
    ):
        right = " or ".join(jnp.dtype(dtype).name for dtype in dtypes)
        raise ValueError(
            f"{argument}: has dtype {array.dtype}; it must be {right or 'floating'}."
        )


def _check_leaves(leaves: Leaves | None, num_tiles: int) -> None:
    if leaves is None:
        raise ValueError(
            "leaves: trust ratios are per leaf; give the leaf of each tile, as Leaves."
        )
    owners = leaves.of_tiles
    if owners.shape != (num_tiles,):
        raise ValueError(
            f"leaves.of_tiles: has shape {owners.shape}; the bucket has {num_tiles} "
            "tiles."
        )
    if num_tiles and not (
        owners[0] >= 0 and owners[-1] < leaves.num and (np.diff(owners) >= 0).all()
    ):
        raise ValueError(
            f"leaves.of_tiles: must be numbers from 0 to num - 1 = {leaves.num - 1}, "
            "in ascending order: a leaf's tiles are contiguous."
        )


def _check_tiles(argument: str, num_elements: int) -> None:
    if num_elements % TILE:
        raise ValueError(
            f"{argument}: {num_elements} elements are not full tiles of {TILE}; pad "
            "each leaf with zeros."
        )
