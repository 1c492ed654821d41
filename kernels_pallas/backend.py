"""Which implementation of a kernel runs where: decided here, and said once."""

from typing import Literal

Choice = Literal["mosaic", "reference"]
"""Kernels for Hopper GPUs and later, or plain JAX."""


def choose(kernel: str, asked: Choice | None) -> Choice:
    """Choose an implementation.

    Args:
      kernel: the name of the kernel.
      asked: what the caller wants; None for the fastest that runs here.

    Returns:
      The implementation.
    """
    del kernel
    return asked or "reference"
