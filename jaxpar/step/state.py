"""What is carried from step to step: one logical tree, whatever the mesh.

`TrainState` has the same leaves and the same logical shapes for every mesh, ZeRO stage
and precision; only shardings differ. So any checkpoint restores anywhere. An optimizer
may keep it in another form (`jaxpar.step.update`).
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar import tree
from jaxpar.model.bridge import Network
from jaxpar.sharding.zero import LeafSharding, ZeroStage, shard_leaves
from jaxpar.step.loss_scale import init_loss_scale
from jaxpar.step.update import Update
from jaxpar.types import Leaf, Params, PyTree


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """The whole state of a training run on its devices.

    Attributes:
      step: steps taken, skipped ones too; int32 scalar.
      params: fp32 masters; a nested dict.
      model_state: what the model changes besides (batch statistics); a nested dict.
      opt_state: the optimizer's.
      key: the run's key; every step folds its own number in.
      loss_scale: the loss scaler's state, inert outside fp16.
    """

    step: Leaf
    params: Params
    model_state: PyTree
    opt_state: PyTree
    key: Leaf
    loss_scale: PyTree


def make_init(
    network: Network, init_opt_state: Callable[[Params], PyTree]
) -> Callable[[jax.Array], TrainState]:
    """Make the pure function ``key -> TrainState``, to be jitted with shardings."""

    def init(key: jax.Array) -> TrainState:
        init_key, run_key = jax.random.split(key)
        params, model_state = network.init(init_key)
        params = jax.tree.map(lambda x: x.astype(jnp.float32), params)
        return TrainState(
            step=jnp.int32(0),
            params=params,
            model_state=model_state,
            opt_state=jax.tree_util.tree_map_with_path(
                _as_array, init_opt_state(params)
            ),
            key=run_key,
            loss_scale=init_loss_scale(),
        )

    return init


def _as_array(path: tuple, leaf: Any) -> jax.Array:
    """A leaf of an optimizer's state; numbers become arrays of a strong type, for a
    step that met another type than it was compiled for would compile again."""
    try:
        return jax.lax.convert_element_type(leaf, jnp.asarray(leaf).dtype)
    except TypeError as error:
        raise TypeError(
            f"optimizer: leaf {tree.path_name(path)} of its state is "
            f"{type(leaf).__name__}, but must be an array, a number or a PRNG key. "
            "Keep it outside of the state that init returns."
        ) from error


def cast_model_state(after: PyTree, before: PyTree) -> PyTree:
    """Take what a model made of its state, in the dtypes that the state has.

    Args:
      after: the mutable state that a call of the model left.
      before: the one that it was given.

    Returns:
      `after`, cast.

    Raises:
      ValueError: if a leaf has come, gone or changed its shape.
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
            f"{', '.join(changed[:3])}{more}. Every step runs the same program: make "
            "the state in its final shape, which can't have a dim of the batch's rows, "
            "and write into it (x.at[i].set(...))."
        )
    return jax.tree.map(lambda x, like: x.astype(like.dtype), after, before)


def pack_state(update: Update, state: TrainState) -> TrainState:
    """Lay a logical state out as an optimizer keeps it."""
    params, opt_state = update.pack(state.params, state.opt_state)
    return dataclasses.replace(state, params=params, opt_state=opt_state)


def unpack_state(update: Update, packed: TrainState) -> TrainState:
    """Undo `pack_state`."""
    params, opt_state = update.unpack(packed.params, packed.opt_state)
    return dataclasses.replace(packed, params=params, opt_state=opt_state)


def packed_structs(
    update: Update, abstract: TrainState, shardings: TrainState
) -> TrainState:
    """Say what is kept of a logical state.

    Args:
      update: the optimizer.
      abstract: the logical state's shapes.
      shardings: where it would rest.

    Returns:
      Shapes, dtypes and shardings of what `pack_state` makes.
    """
    places = update.shardings(shardings.params, shardings.opt_state)
    placed = dataclasses.replace(shardings, params=places[0], opt_state=places[1])
    shapes = jax.eval_shape(functools.partial(pack_state, update), abstract)
    return jax.tree.map(
        lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
        shapes,
        placed,
    )


def state_shardings(
    abstract: TrainState,
    leaf_shardings: Mapping[str, LeafSharding],
    zero: ZeroStage,
    mesh: Mesh,
) -> TrainState:
    """Say where every leaf of the state rests.

    An optimizer leaf whose path ends with a parameter's and whose shape is the same
    mirrors that parameter and follows it (masked and nested transformations too); any
    other (Adafactor's rows and columns, say) goes by the same shape rule. Typed PRNG
    keys are replicated.

    Args:
      abstract: the state's shapes.
      leaf_shardings: parameter name -> plan.
      zero: the row of the ZeRO table.
      mesh: the mesh.

    Returns:
      A TrainState of NamedShardings.
    """

    def beside(name: str, leaf: jax.ShapeDtypeStruct) -> NamedSharding:
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return NamedSharding(mesh, P())
        parts = name.split("/")
        ends = ("/".join(parts[i:]) for i in range(len(parts)))
        sharded = next(
            (leaf_shardings[end] for end in ends if end in leaf_shardings), None
        )
        if sharded is None or sharded.shape != leaf.shape:
            whole = {name: (None,) * len(leaf.shape)}
            sharded = shard_leaves({name: leaf}, whole, zero, mesh.shape, (name,))[name]
        return NamedSharding(mesh, sharded.stored_spec)

    def placed(part: PyTree) -> PyTree:
        specs = [beside(name, x) for name, x in tree.named_leaves(part).items()]
        return jax.tree.unflatten(jax.tree.structure(part), specs)

    replicated = jax.tree.map(lambda _: NamedSharding(mesh, P()), abstract)
    return dataclasses.replace(
        replicated,
        params=placed(abstract.params),
        opt_state=placed(abstract.opt_state),
    )


def filled_in(read: TrainState, own: TrainState) -> TrainState:
    """A state of which some leaves were read, with its own where they are structs."""
    return jax.tree.map(
        lambda new, old: new if isinstance(new, jax.Array) else old, read, own
    )


def require_sound(state: TrainState) -> None:
    """Refuse a state that no training can go on from; waits for the devices.

    Args:
      state: the state.

    Raises:
      FloatingPointError: if a parameter is not finite, or another leaf is NaN (an
        infinity may stand there for "none yet").
    """
    leaves = {
        name: leaf
        for name, leaf in tree.named_leaves(state).items()
        if jnp.issubdtype(leaf.dtype, jnp.floating)
    }
    bad = jax.device_get(_unsound(leaves))
    wrong = [name for name in leaves if bad[name]]
    if wrong:
        more = f" and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        raise FloatingPointError(
            f"the state is not finite: {', '.join(wrong[:5])}{more}. Nothing was "
            "saved; go back to the last checkpoint."
        )


@jax.jit
def _unsound(leaves: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Leaf name -> whether it holds what it must not."""

    def is_bad(name: str, leaf: jax.Array) -> jax.Array:
        is_param = name.startswith("params/")
        return jnp.any(~jnp.isfinite(leaf) if is_param else jnp.isnan(leaf))

    return {name: is_bad(name, leaf) for name, leaf in leaves.items()}
