"""The names that every signature uses, and the letters that stand for dims.

Shape letters, in array names (``query_BTNH``) and in jaxtyping annotations alike:
B batch, T query length, S key length, D model width, F hidden width, N heads,
K key/value heads, H head size, V vocabulary, E experts, C capacity, L layers,
M micro-batches, P stages.
"""

from collections.abc import Callable
from typing import Any

import jax

PyTree = Any
"""A nested structure of dicts, tuples and lists whose leaves are arrays."""

Leaf = Any
"""An array, or its shape or sharding in a tree of those."""

Params = PyTree
"""The trainable leaves: a nested dict of fp32 arrays, in canonical layer order."""

Batch = PyTree
"""A nested structure of arrays whose leading dim counts examples."""

Metrics = dict[str, jax.Array]
"""Scalars by name, on the device until they are read."""

LossFn = Callable[..., Any]
"""``(model, batch) -> loss`` or ``(loss, metrics)``; a loss may be `Weighted`."""
