"""Which implementation of a kernel runs on which device: decided here, logged once.

The kernels are for Hopper GPUs, because they use their matrix instructions (wgmma), and
for jax 0.11.2 and later. All other devices use plain JAX.
"""

import functools
import logging
from typing import Literal, get_args

import jax
import jax.numpy as jnp

Choice = Literal["mosaic", "reference"]
"""Kernels for Hopper GPUs, or plain JAX."""

LEAST_JAX = (0, 11, 2)
HOPPER = ("H100", "H200", "H20", "H800", "GH200")
"""Parts of the names of devices of compute capability 9.0."""

_log = logging.getLogger(__name__)


def choose(
    kernel: str,
    asked: Choice | None,
    *,
    dtype: jnp.dtype | None = None,
    unsupported: str | None = None,
) -> Choice:
    """Choose an implementation, for the device that the program is traced for.

    Args:
      kernel: its name.
      asked: the requested implementation; None for the fastest that runs here.
      dtype: of the matmul operands; None where that does not matter.
      unsupported: why the kernel can't compute this; None if it can.

    Returns:
      The implementation. The choice is logged once, as a warning if a GPU that has the
      kernels uses plain JAX.

    Raises:
      ValueError: if there is no such implementation, or the kernels were requested and
        can't run.
    """
    if asked not in (None, *get_args(Choice)):
        known = " or ".join(map(repr, get_args(Choice)))
        raise ValueError(
            f"implementation={asked!r}: must be {known}, or None for the fastest that "
            "runs here."
        )
    device, reason = device_kind(), unsupported
    if dtype is not None and dtype not in (jnp.bfloat16, jnp.float16):
        reason = f"it multiplies bf16 and fp16, but was given {jnp.dtype(dtype).name}"
    elsewhere = _why_not_here(device)
    if asked == "mosaic" and (elsewhere or reason):
        raise ValueError(
            f"implementation='mosaic': the kernel of {kernel} can't run here: "
            f"{elsewhere or reason}; omit the argument for plain JAX."
        )
    if asked == "reference":
        return asked
    if elsewhere or reason:
        level = logging.INFO if elsewhere else logging.WARNING
        _say_once(level, f"{kernel}: plain JAX, because {elsewhere or reason}")
        return "reference"
    _say_once(logging.INFO, f"{kernel}: the kernel for {device}")
    return "mosaic"


def has_kernels() -> bool:
    """Whether the device that the program is traced for has the kernels."""
    return _why_not_here(device_kind()) is None


def device_kind() -> str:
    """The kind of device that the traced program will run on."""
    mesh_device = jax.sharding.get_abstract_mesh().abstract_device
    return (mesh_device or jax.devices()[0]).device_kind


def _why_not_here(device: str) -> str | None:
    """Why no kernel runs on a device; None if kernels run."""
    if not any(name in device for name in HOPPER):
        return f"{device} is not a Hopper GPU"
    if jax.__version_info__ < LEAST_JAX:
        least = ".".join(map(str, LEAST_JAX))
        return f"jax {jax.__version__} is older than {least}"
    return None


@functools.cache
def _say_once(level: int, message: str) -> None:
    _log.log(level, message)
