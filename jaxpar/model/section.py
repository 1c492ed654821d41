"""What is a section: equal blocks, stacked, and the part that runs once before them."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxpar.model.bridge import Network
from jaxpar.types import Params, PyTree

LAYERS = "layers"
"""The logical name of the dim along which blocks are stacked."""


@dataclasses.dataclass(frozen=True, eq=False)
class SectionNetwork:
    """Equal blocks, one after the other, and the part that runs once before them.

    Attributes:
      name: under which the parameters are.
      num_blocks: L of this section.
      first: blocks of the sections before.
      blocks: one network for all blocks, or one for each.
      before: shapes of the hidden state that the section before returns.
      hidden: shapes of the hidden state between its blocks.
      between: the part that turns the first into the second; None for none.
      between_name: under which that part's parameters are.
    """

    name: str
    num_blocks: int
    first: int
    blocks: Sequence[Network]
    before: PyTree
    hidden: PyTree
    between: Network | None = None
    between_name: str = ""

    def init(self, keys: jax.Array) -> tuple[Params, PyTree]:
        """Make the blocks' parameters and state, [L, ...]; each has its key of [L]."""
        if len(self.blocks) == 1:
            return jax.vmap(self.blocks[0].init)(keys)
        drawn = [n.init(k) for n, k in zip(self.blocks, keys, strict=True)]
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *drawn)
