"""How are layers left out of training steps, fewer at first and more later?

Progressive layer drop: a block of a section is kept with a probability that falls with
its depth and with the step. What a kept block adds is divided by its probability, so
that the expectation is that of the whole model, and an evaluation has all blocks as
they are. A block that is left out does no work, forwards or backwards.

Source: Zhang & He, "Accelerating Training of Transformer-Based Language Models with
Progressive Layer Dropping" (2020).
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.jaxprs.branches import alike_on_all_devices, expected
from jaxpar.types import PyTree

_SALT = 0x1D0F
"""Folded into a block's key: its dropout masks are those that it has without this."""


@dataclasses.dataclass(frozen=True)
class LayerDrop:
    """Which share of a model's blocks a training step runs.

    At step t, the share of the last block is ``(1 - theta) exp(-gamma t) + theta``; of
    block l of L, from 1, it is ``1 - l / L (1 - that)``.

    Attributes:
      theta: the last block's share in the end, above 0, at most 1.
      gamma: how fast it gets there, 1 / steps: 10 / steps of a run leaves 4 % of the
        way at a third of it.

    Raises:
      ValueError: if a number is out of range.

    Example:
      >>> drop = LayerDrop(theta=0.5, gamma=1e-3)
      >>> [round(float(drop.share(10_000, block, 4)), 3) for block in range(4)]
      [0.875, 0.75, 0.625, 0.5]
    """

    theta: float = 0.5
    gamma: float = 1e-3

    def __post_init__(self):
        if not 0 < self.theta <= 1:
            raise ValueError(
                f"LayerDrop: theta={self.theta} must be above 0 and at most 1; it is "
                "the share of steps that run the last block in the end."
            )
        if not 0 <= self.gamma < math.inf:
            raise ValueError(
                f"LayerDrop: gamma={self.gamma} must be a number of at least 0; 10 / "
                "steps is a good first choice."
            )

    def share(self, step: Any, block: Any, num_blocks: int) -> jax.Array:
        """The probability that a step runs a block.

        Args:
          step: number of the step, from 0.
          block: number of the block, from 0.
          num_blocks: of the model.
        """
        last = (1 - self.theta) * jnp.exp(-self.gamma * jnp.float32(step)) + self.theta
        return 1 - (jnp.float32(block) + 1) / num_blocks * (1 - last)

    def mean_share(self, step: Any, num_blocks: int) -> jax.Array:
        """Blocks that a step runs, as a share of all, on average."""
        blocks = jnp.arange(num_blocks)
        return self.share(step, blocks, num_blocks).mean()

    def run(
        self,
        block: Callable[[], tuple[PyTree, PyTree]],
        otherwise: tuple[PyTree, PyTree],
        key: jax.Array,
        step: Any,
        place: tuple[Any, int],
    ) -> tuple[PyTree, PyTree]:
        """Run a block, or leave it out.

        Args:
          block: returns what it passes on, and its state.
          otherwise: what it was given, and its state before.
          key: the block's own; the same on all devices, for all must draw alike.
          step: number of the step; None for 0.
          place: the block's number, and how many there are.

        Returns:
          What `block` returns, with what it added divided by its share, or `otherwise`.
        """
        share = self.share(0 if step is None else step, *place)
        drawn = jax.random.bernoulli(jax.random.fold_in(key, _SALT), share)

        def kept() -> tuple[PyTree, PyTree]:
            hidden, state = block()
            return jax.tree.map(added, otherwise[0], hidden), state

        def added(before: jax.Array, after: jax.Array) -> jax.Array:
            if not jnp.issubdtype(after.dtype, jnp.inexact):
                return after
            return before + (after - before) / share.astype(after.dtype)

        blocks = place[1]
        in_the_end = 1 - (blocks + 1) / (2 * blocks) * (1 - self.theta)
        with expected(in_the_end):
            return jax.lax.cond(alike_on_all_devices(drawn), kept, lambda: otherwise)
