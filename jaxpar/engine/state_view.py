"""Which arrays does the engine hand out, and which does it accept from a user?

``engine.state`` is a view: new dicts around the engine's arrays. Setting a leaf of it
has no effect on the engine, so it raises an error.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar import tree
from jaxpar.model.bridge import pure_params
from jaxpar.step.state import TrainState
from jaxpar.types import Params


@dataclasses.dataclass(frozen=True)
class StateView:
    """A state that was handed out, with its leaves at that time.

    Attributes:
      state: the state.
      leaves: leaf name -> the array.
    """

    state: TrainState
    leaves: Mapping[str, Any]

    def require_unchanged(self) -> None:
        """Check that no leaf was set.

        Raises:
          ValueError: if a leaf was replaced, added or removed.
        """
        now = tree.named_leaves(self.state)
        names = [*self.leaves, *(now.keys() - self.leaves.keys())]
        changed = [n for n in names if now.get(n) is not self.leaves.get(n)]
        if changed:
            more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
            raise ValueError(
                f"engine.state: {', '.join(changed[:3])}{more} was set, but the state "
                "is a view: setting its leaves has no effect on the engine. Pass new "
                "parameters to engine.load_params(params); other leaves are restored "
                "from a checkpoint (engine.restore)."
            )


def make_view(state: TrainState) -> StateView:
    """Record a state that is handed out."""
    return StateView(state, tree.named_leaves(state))


def with_weights(state: TrainState, given: Params, structs: TrainState) -> TrainState:
    """A state with a user's parameters, for steps that donate it.

    Args:
      state: the state.
      given: as for `placed_params`, of the parameters that are trained, or of all.
      structs: the state's shapes, dtypes and shardings.

    Returns:
      The state; the parameters that are not given are its own.

    Raises:
      ValueError: as `placed_params`.
    """
    given, names = pure_params(given), tree.named_leaves(structs.frozen)
    if names.keys() & tree.named_leaves(given).keys():
        whole = tree.merged(*structs.weights)
        placed = placed_params(given, whole, may_alias=False)
        weights = tree.parted(placed, tree.named_leaves(structs.params).keys())
        return dataclasses.replace(state, params=weights[0], frozen=weights[1])
    placed = placed_params(given, structs.params, may_alias=False)
    return dataclasses.replace(state, params=placed)


def placed_params(
    given: Params, structs: Params, *, may_alias: bool | None = None
) -> Params:
    """Place a user's parameters with the engine's shardings.

    Args:
      given: arrays by the same names, of the same shapes and, if the engine's are
        floating, any floating dtype; or an ``nnx.state(model, nnx.Param)``.
      structs: the engine's own shapes, dtypes and shardings.
      may_alias: as in `jax.device_put`; False if the engine will donate the arrays.

    Returns:
      Arrays of the engine's dtypes on its mesh, in its own tree structure.

    Raises:
      ValueError: if leaves are missing or unknown, have another shape or another kind
        of dtype.
    """
    own, new = tree.named_leaves(structs), tree.named_leaves(pure_params(given))
    missing, unknown = sorted(own.keys() - new.keys()), sorted(new.keys() - own.keys())
    if missing or unknown:
        raise ValueError(
            f"params: missing {missing[:3]} and unknown {unknown[:3]} (the first three "
            f"of {len(missing)} and {len(unknown)}); pass a tree of the leaves of "
            "engine.state.params, and of engine.state.frozen if all are loaded."
        )
    for name, struct in own.items():
        shape, dtype = np.shape(new[name]), jnp.result_type(new[name])
        floating = jnp.issubdtype(struct.dtype, jnp.floating)
        fits = (
            jnp.issubdtype(dtype, jnp.floating) if floating else dtype == struct.dtype
        )
        if shape != struct.shape or not fits:
            raise ValueError(
                f"params: {name} is {dtype}{list(shape)}, but must be "
                f"{'floating' if floating else struct.dtype} of shape "
                f"{list(struct.shape)}."
            )
    placed = [_placed(new[name], own[name], may_alias) for name in own]
    return jax.tree.unflatten(jax.tree.structure(structs), placed)


def discard(donated: Sequence[jax.Array]) -> None:
    """Delete donated arrays that are not marked as deleted.

    If NumPy references the memory, the array remains on the first device and is gone
    on the others: a program that takes it then hangs in its collectives.
    """
    for leaf in donated:
        if not leaf.is_deleted():
            leaf.delete()


def _placed(
    leaf: Any, struct: jax.ShapeDtypeStruct, may_alias: bool | None
) -> jax.Array:
    if not isinstance(leaf, jax.Array):
        leaf = np.asarray(leaf)  # Cast on the host: it may not fit one device.
    cast = leaf.astype(struct.dtype)
    return jax.device_put(cast, struct.sharding, may_alias=may_alias)
