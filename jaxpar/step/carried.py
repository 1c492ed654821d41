"""What do techniques keep in the train state: named parts, each with its own update.

A part is a tree of arrays under ``state.carried[name]``. A logical part has the same
leaves on every mesh, so that a checkpoint of it restores on any. A leaf whose name ends
with a parameter's, of the same shape, is sharded as that parameter is stored.

A part may also be of each data shard (``per_shard``), as the error that a compressed
reduction left out. Its arrays have the data shards as dim 0. A checkpoint restores it
exactly where the batch axes are the same; elsewhere its `init` makes it anew from the
restored parameters, with a warning.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar import tree
from jaxpar.mesh import num_batch_shards, rows_spec
from jaxpar.types import Params, PyTree


@dataclasses.dataclass(frozen=True)
class Stepped:
    """What a training step did, as its carried parts see it.

    Attributes:
      params: the parameters after the step, fp32, by name.
      before: those before it.
      finite: whether all gradients were finite; a boolean scalar.
      applied: whether the step was applied; a boolean scalar. A step that was not
        applied has the parameters of before.
      skipped: whether it was to be applied and was not; a boolean scalar.
      carry: name of a part -> what the computation of gradients made of it
        (`Carried.in_gradients`).
    """

    params: Params
    before: Params
    finite: jax.Array
    applied: jax.Array
    skipped: jax.Array
    carry: Mapping[str, PyTree] = dataclasses.field(default_factory=dict)


@runtime_checkable
class Carried(Protocol):
    """A part of the state that a technique brings.

    Attributes:
      name: the key in ``state.carried``.
      per_shard: whether every data shard has its own.
      saved: whether checkpoints hold it; if not, it starts anew at a restore.
      in_gradients: whether the computation of gradients reads it. If it is per shard
        too, that also makes what follows it: `Stepped.carry`.
    """

    name: str
    per_shard: bool = False
    saved: bool = True
    in_gradients: bool = False

    def init(self, params: Params) -> PyTree:
        """Make the part for the initial parameters, fp32; traceable.

        Of a part that is per shard, what one shard has, without the dim of the shards.
        """
        ...

    def begin(self, params: Params, opt_state: PyTree) -> PyTree:
        """Make the part for a run that goes on without it; traceable.

        Args:
          params: fp32.
          opt_state: the optimizer's state, logical.
        """
        del opt_state
        return self.init(params)

    def at_new_params(self, part: PyTree) -> PyTree:
        """The part where other parameters take the place of those before."""
        return part

    def spec(self, name: str, shape: tuple[int, ...]) -> P:
        """How pipe and tensor split an array of one shard; used if it is per shard."""
        del name, shape
        return P()

    def after(self, part: PyTree, stepped: Stepped) -> PyTree:
        """The part after a training step; in automatic mode, on global arrays."""
        ...


def init_logical_parts(parts: Sequence[Carried], params: Params) -> dict[str, PyTree]:
    """Make the parts that are not per shard; traceable."""
    return {part.name: part.init(params) for part in parts if not part.per_shard}


def init_shard_parts(
    parts: Sequence[Carried], params: Params, mesh: Mesh
) -> dict[str, PyTree]:
    """Make the parts that are per shard; all shards begin with the same; traceable."""
    own = [part for part in parts if part.per_shard]
    return {part.name: on_shards(part.init(params), mesh) for part in own}


def begin_parts(
    parts: Sequence[Carried], params: Params, opt_state: PyTree, mesh: Mesh
) -> dict[str, PyTree]:
    """Make parts for a run that goes on without them; traceable."""
    found = {part.name: part.begin(params, opt_state) for part in parts}
    return {
        part.name: on_shards(found[part.name], mesh)
        if part.per_shard
        else found[part.name]
        for part in parts
    }


def on_shards(part: PyTree, mesh: Mesh) -> PyTree:
    """What one shard has, on all data shards, their dim first."""
    count = num_batch_shards(mesh)
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (count, *jnp.shape(x))), part)


def shard_part_shardings(part: Carried, arrays: PyTree, mesh: Mesh) -> PyTree:
    """The shardings of a part that is per shard: over the batch axes, and by its spec.

    Args:
      part: the part.
      arrays: its arrays or shapes; dim 0 is the data shards.
      mesh: the mesh.
    """

    def place(name: str, shape: tuple[int, ...]) -> NamedSharding:
        spec = P(*rows_spec(mesh), *part.spec(name, shape[1:]))
        return NamedSharding(mesh, spec)

    named = tree.named_leaves(arrays).items()
    places = [place(name, tuple(x.shape)) for name, x in named]
    return jax.tree.unflatten(jax.tree.structure(arrays), places)


def check_carried(parts: Sequence[Any]) -> None:
    """Check the parts that a user passes.

    Raises:
      TypeError: if one is not a `Carried`.
      ValueError: if a name is taken twice, or isn't a name.
    """
    names = {"loss_scale", "reduction", "step"}  # The engine's own.
    for part in parts:
        if not isinstance(part, Carried):
            raise TypeError(
                f"carried: {part!r} must have a name, init(params) and after(part, "
                "stepped), as jaxpar.Ema(0.999) has; derive it from "
                "jaxpar.step.carried.Carried."
            )
        if not part.name or "/" in part.name:
            raise ValueError(
                f"carried: {type(part).__name__} is named {part.name!r}; the name is a "
                "key of state.carried: give it letters, and no slash."
            )
        if part.name in names:
            raise ValueError(
                f"carried: {part.name!r} is the name of two parts (loss_scale, "
                "reduction and step are the engine's own); name one otherwise, such as "
                "Ema(0.99, name='ema_fast')."
            )
        names.add(part.name)
