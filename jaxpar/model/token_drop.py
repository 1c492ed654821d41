"""How do middle layers see a random part of the tokens, and later all of them?

Random layerwise token dropping (random-LTD): a block gets some of the tokens, in their
order and with their positions, and the others pass by it unchanged. An evaluation has
all tokens everywhere.

Source: Yao et al., "Random-LTD: Random and Layerwise Token Dropping Brings Efficient
Training for Large-scale Transformers" (2022).
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.data.growth import Growth
from jaxpar.jaxprs.branches import expected
from jaxpar.model.bridge import Network
from jaxpar.model.proxies import Call, keywords_of
from jaxpar.model.section import SectionNetwork
from jaxpar.tree import named_leaves
from jaxpar.types import PyTree

_SALT = 0x170D
"""Folded into a block's key: its dropout masks are those that it has without this."""

Block = Callable[..., tuple[PyTree, PyTree]]


@dataclasses.dataclass(frozen=True)
class RandomLTD:
    """Which blocks see how many of a row's tokens in training steps.

    The number grows linearly with the step, from `start` to all tokens, down to a
    multiple of `multiple`. Each block draws its own tokens, in each step and
    micro-batch, the same in all rows.

    Attributes:
      first: the first block that does not see all, from 0; negative from the end.
      last: the last one.
      start: tokens that they see in the first step.
      steps: from which on they see all.
      multiple: of the numbers of tokens; each is a branch of the program.
      positions: the keyword by which blocks take each token's position; None for
        blocks that use none (where they are a part of the embedding).

    Raises:
      ValueError: if a number is out of range.

    Example:
      >>> drop = RandomLTD(start=128, steps=1000, multiple=128)
      >>> drop.growth(512).values, drop.growth(512).starts
      ((128, 256, 384, 512), (0, 334, 667, 1000))
    """

    first: int = 1
    last: int = -2
    start: int = dataclasses.field(kw_only=True)
    steps: int = dataclasses.field(kw_only=True)
    multiple: int = dataclasses.field(default=64, kw_only=True)
    positions: str | None = dataclasses.field(default="positions_BT", kw_only=True)

    def __post_init__(self):
        for name in ("steps", "multiple"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"RandomLTD: {name}={getattr(self, name)} must be at least 1."
                )
        if self.start < 1 or self.start % self.multiple:
            raise ValueError(
                f"RandomLTD: start={self.start} must be a positive multiple of "
                f"multiple={self.multiple}; change one of the two."
            )

    def growth(self, num_tokens: int) -> Growth:
        """How many tokens of a row blocks see by step, up to all of them or more."""
        end = -(-num_tokens // self.multiple) * self.multiple
        return Growth(self.start, end, steps=self.steps, multiple=self.multiple)

    def blocks(self, num_blocks: int) -> range:
        """The blocks that do not see all tokens.

        Raises:
          ValueError: if there are no such blocks.
        """
        ends = {"first": self.first, "last": self.last}
        for name, place in ends.items():
            if not -num_blocks <= place < num_blocks:
                raise ValueError(
                    f"RandomLTD: {name}={place} is none of the model's {num_blocks} "
                    f"blocks; give 0 to {num_blocks - 1}, or -{num_blocks} to -1."
                )
        first, last = (place % num_blocks for place in ends.values())
        if first > last:
            raise ValueError(
                f"RandomLTD: first={self.first} is behind last={self.last} of "
                f"{num_blocks} blocks, so that all see all tokens; give others, or "
                "token_drop=None."
            )
        return range(first, last + 1)

    def check(self, sections: Sequence[SectionNetwork], call: Call) -> None:
        """Check that a model has such blocks and tokens.

        Args:
          sections: of the model.
          call: of the model, as shapes.

        Raises:
          ValueError: if it has not.
        """
        num_blocks = sum(section.num_blocks for section in sections)
        chosen = self.blocks(num_blocks)
        for section in sections:
            last = section.first + section.num_blocks
            if section.first > chosen[-1] or last <= chosen[0]:
                continue
            num_tokens = _num_tokens(section.hidden)
            if num_tokens is None:
                shapes = {k: x.shape for k, x in named_leaves(section.hidden).items()}
                raise ValueError(
                    f"token_drop: the blocks of {section.name!r} pass on {shapes}, but "
                    "RandomLTD needs one array [B, T, D], and others of fewer dims; "
                    "choose blocks of another section by first= and last=, or leave "
                    "token_drop out."
                )
            if self.start > num_tokens:
                raise ValueError(
                    f"RandomLTD: start={self.start} must be at most the "
                    f"{num_tokens} tokens of a row in {section.name!r}."
                )
            self._check_positions(section.name, section.blocks[0], call, section.hidden)

    def _check_positions(
        self, name: str, block: Network, call: Call, hidden: PyTree
    ) -> None:
        if self.positions is None:
            return
        taken = keywords_of(block, call.passing(hidden))
        if taken is not None and self.positions not in taken:
            raise ValueError(
                f"RandomLTD: positions={self.positions!r} is not a keyword of the "
                f"blocks of {name!r}, which could not know the places of the tokens "
                "that they see; name theirs, or None if they use no positions."
            )

    def dropping(self, block: Block, place: Any, num_blocks: int) -> Block:
        """Make a block of a training step, which sees some of its tokens.

        Args:
          block: ``(variables, hidden, call, key) -> (hidden, state)``.
          place: its number, which may be traced.
          num_blocks: of the model.
        """

        def run(
            variables: PyTree, hidden: PyTree, call: Call, key: jax.Array
        ) -> tuple[PyTree, PyTree]:
            num_tokens = _num_tokens(hidden)
            # The blocks of another section may have no tokens, and are not chosen.
            if num_tokens is None or self.start >= num_tokens:
                return block(variables, hidden, call, key)
            scores = jax.random.bits(jax.random.fold_in(key, _SALT), (num_tokens,))
            order = jnp.argsort(scores)

            def seeing(kept: int) -> Callable[[], tuple[PyTree, PyTree]]:
                if kept >= num_tokens:
                    return lambda: block(variables, hidden, call, key)
                return lambda: self._run(
                    block, variables, hidden, call, key, jnp.sort(order[:kept])
                )

            growth = self.growth(num_tokens)
            branches = [seeing(kept) for kept in growth.values]
            step = jnp.int32(0) if call.step is None else call.step
            index = sum(step >= start for start in growth.starts[1:])
            chosen = self.blocks(num_blocks)
            dropped = (chosen[0] <= place) & (place <= chosen[-1])
            index = jnp.where(dropped, index, len(branches) - 1)
            with expected(*[0.0] * (len(branches) - 1), 1.0):  # In the end.
                return jax.lax.switch(index, branches)

        return run

    def _run(
        self,
        block: Block,
        variables: PyTree,
        hidden: PyTree,
        call: Call,
        key: jax.Array,
        kept: jax.Array,
    ) -> tuple[PyTree, PyTree]:
        """Run a block on the tokens at sorted places `kept`."""
        num_tokens = _num_tokens(hidden)

        def some(leaf: Any) -> Any:
            if jnp.ndim(leaf) < 2 or jnp.shape(leaf)[1] != num_tokens:
                return leaf
            return jnp.take(leaf, kept, axis=1, mode="clip")

        def back(before: jax.Array, after: jax.Array) -> jax.Array:
            if before.shape == after.shape:
                return after
            places = before.at[:, kept]
            return places.set(
                after,
                indices_are_sorted=True,
                unique_indices=True,
                mode="promise_in_bounds",
            )

        keywords = jax.tree.map(some, call.kwargs)
        name = self.positions
        if name is not None and keywords.get(name) is None:
            keywords[name] = kept[None].astype(jnp.int32)
        own = dataclasses.replace(call, kwargs=keywords)
        out, state = block(variables, jax.tree.map(some, hidden), own, key)
        return jax.tree.map(back, hidden, out), state


def _num_tokens(hidden: PyTree) -> int | None:
    """T of the one array [B, T, D] of a hidden state; None if there are others."""
    wide = [leaf for leaf in jax.tree.leaves(hidden) if len(leaf.shape) > 2]
    return wide[0].shape[1] if len(wide) == 1 else None
