"""How is a part's mutable state passed on, and what may a step change of it?"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from jaxpar import tree
from jaxpar.types import Params, PyTree

Variables = tuple[Params, PyTree]
"""A part's parameters and its mutable state, {} for none."""


def cast_model_state(after: PyTree, before: PyTree) -> PyTree:
    """Cast a model's new mutable state to the dtypes of the old one.

    Args:
      after: the mutable state after a call of the model.
      before: the state before it.

    Returns:
      `after`, cast.

    Raises:
      ValueError: if a leaf was added, removed or changed its shape.
    """
    new, old = (
        {name: jnp.shape(leaf) for name, leaf in tree.named_leaves(state).items()}
        for state in (after, before)
    )
    changed = [
        f"{name} from {old.get(name, 'nothing')} to {new.get(name, 'nothing')}"
        for name in {**old, **new}
        if old.get(name) != new.get(name)
    ]
    if changed:
        more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
        raise ValueError(
            "model: a training step changes the shape of its state: "
            f"{', '.join(changed[:3])}{more}. Every step runs the same program: "
            "initialise the state in its final shape, without a dim of the batch's "
            "rows, and write into it (x.at[i].set(...))."
        )
    return jax.tree.map(lambda x, like: x.astype(like.dtype), after, before)


def with_leaves(parts: Mapping[str, PyTree]) -> dict[str, PyTree]:
    """The state of the parts that have one."""
    return {part: state for part, state in parts.items() if jax.tree.leaves(state)}
