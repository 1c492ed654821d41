"""Which causal patterns can be chosen by name, with sizes in tokens?"""

from collections.abc import Callable
from typing import Any

from jaxpar.sparse_attention.blocks import check_positive
from jaxpar.sparse_attention.layouts import SparsityPattern
from jaxpar.sparse_attention.patterns import (
    BigBird,
    BSLongformer,
    Dense,
    Fixed,
    LocalSlidingWindow,
    Variable,
)

SIZES = {
    "fixed": ("window", "global_tokens"),
    "variable": ("window", "global_tokens"),
    "bigbird": ("window", "global_tokens"),
    "longformer": ("window", "global_tokens"),
    "sliding": ("window",),
}
"""The sizes in tokens that each pattern has."""


def causal_pattern(
    name: str,
    *,
    num_heads: int,
    block: int = 64,
    window: int = 256,
    global_tokens: int = 64,
    num_random_blocks: int = 1,
    seed: int = 0,
) -> SparsityPattern:
    """Make a unidirectional pattern from sizes in tokens.

    Args:
      name: dense, fixed, variable, bigbird, longformer or sliding.
      num_heads: attention heads.
      block: tokens along each side of a block.
      window: tokens that a token sees before its own block; for fixed and variable,
        tokens of each of the adjacent windows. A multiple of `block`.
      global_tokens: first tokens, seen by all; for fixed, last tokens of each window.
        A multiple of `block`.
      num_random_blocks: random blocks that a block of tokens sees, for variable and
        bigbird.
      seed: of random blocks.

    Returns:
      The pattern.

    Raises:
      ValueError: if there is no such pattern, or a number is not valid.

    Example:
      >>> causal_pattern("sliding", num_heads=4, window=128).num_sliding_window_blocks
      5
    """
    check_positive(num_heads=num_heads, block=block)
    sizes = {"window": window, "global_tokens": global_tokens}
    for field in SIZES.get(name, ()):
        _check_size(field, sizes[field], block)
    shape: dict[str, Any] = {
        "num_heads": num_heads,
        "block": block,
        "attention": "unidirectional",
    }
    sliding: dict[str, Any] = {"num_sliding_window_blocks": 2 * (window // block) + 1}
    drawn: dict[str, Any] = {"num_random_blocks": num_random_blocks, "seed": seed}
    num_global = global_tokens // block
    first: dict[str, Any] = {
        "global_block_indices": (0,),
        "global_block_end_indices": (num_global,),
    }
    makers: dict[str, Callable[[], SparsityPattern]] = {
        "dense": lambda: Dense(**shape),
        "fixed": lambda: Fixed(
            **shape, num_local_blocks=window // block, num_global_blocks=num_global
        ),
        "variable": lambda: Variable(
            **shape, **drawn, **first, local_window_blocks=(window // block,)
        ),
        "bigbird": lambda: BigBird(
            **shape, **drawn, **sliding, num_global_blocks=num_global
        ),
        "longformer": lambda: BSLongformer(**shape, **sliding, **first),
        "sliding": lambda: LocalSlidingWindow(**shape, **sliding),
    }
    if name not in makers:
        from jaxpar.tree import near_match  # noqa: PLC0415 - imports jax

        raise ValueError(
            f"pattern={name!r}: must be one of {', '.join(makers)}."
            f"{near_match(name, list(makers))}"
        )
    return makers[name]()


def _check_size(field: str, tokens: int, block: int) -> None:
    if tokens < block or tokens % block:
        nearest = max(1, round(tokens / block)) * block
        raise ValueError(
            f"{field}={tokens}: must be a positive multiple of block={block}; the "
            f"nearest is {nearest}."
        )
