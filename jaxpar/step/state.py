"""What is the train state: one logical tree, the same for every mesh.

`TrainState` has the same leaves and the same logical shapes for every mesh, ZeRO stage
and precision; only shardings differ. So any checkpoint restores on any mesh. An
optimizer may store it in packed form (`jaxpar.step.update`).
"""

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar import tree
from jaxpar.model.bridge import Network
from jaxpar.sharding.leaf_sharding import LeafSharding
from jaxpar.sharding.memory_kinds import to_device
from jaxpar.sharding.zero import ZeroStage, shard_leaves
from jaxpar.step.carried import (
    Carried,
    init_logical_parts,
    init_shard_parts,
    shard_part_shardings,
)
from jaxpar.step.update import Update
from jaxpar.types import Leaf, Params, PyTree


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """The full state of a training run on its devices.

    Attributes:
      step: steps taken, including skipped ones; int32 scalar.
      params: fp32 masters of what is trained; a nested dict.
      frozen: the other parameters, in their own dtypes; a nested dict.
      model_state: mutable state of the model (batch statistics); a nested dict.
      opt_state: the optimizer's state.
      key: the run's key; every step folds in its number.
      carried: what techniques bring, by name (`jaxpar.step.carried`): the loss scale,
        unused outside fp16, and others.
    """

    step: Leaf
    params: Params
    frozen: Params
    model_state: PyTree
    opt_state: PyTree
    key: Leaf
    carried: dict[str, PyTree]

    @property
    def weights(self) -> tuple[Params, Params]:
        """The parameters that are trained, and the others."""
        return self.params, self.frozen


def make_init(
    network: Network,
    init_opt_state: Callable[[Params], PyTree],
    carried: Sequence[Carried] = (),
    trained: Callable[[Params], Collection[str]] = tree.named_leaves,
) -> Callable[[jax.Array], TrainState]:
    """Make the pure function ``key -> TrainState``, to be jitted with shardings.

    Args:
      network: the model.
      init_opt_state: of the parameters that are trained.
      carried: the parts of ``state.carried``; those per shard are added later.
      trained: the names of the parameters that are trained, from all parameters.
    """

    def init(key: jax.Array) -> TrainState:
        init_key, run_key = jax.random.split(key)
        params, model_state = network.init(init_key)
        params, frozen = tree.parted(params, trained(params))
        params = jax.tree.map(lambda x: x.astype(jnp.float32), params)
        return TrainState(
            step=jnp.int32(0),
            params=params,
            frozen=frozen,
            model_state=model_state,
            opt_state=jax.tree_util.tree_map_with_path(
                _as_array, init_opt_state(params)
            ),
            key=run_key,
            carried=init_logical_parts(carried, params),
        )

    return init


def with_shard_parts(
    state: TrainState, carried: Sequence[Carried], mesh: Mesh
) -> TrainState:
    """Add the parts that `make_init` has not made; traceable.

    They are those of every data shard, and of the schedule, known after the model's.
    """
    missing = [part for part in carried if part.name not in state.carried]
    parts = init_logical_parts(missing, state.params)
    parts |= init_shard_parts(missing, state.params, mesh)
    return dataclasses.replace(state, carried=state.carried | parts)


def _as_array(path: tuple, leaf: Any) -> jax.Array:
    """A leaf of an optimizer's state. Numbers become strongly typed arrays: a step
    called with another type than it was compiled for would recompile."""
    try:
        return jax.lax.convert_element_type(leaf, jnp.asarray(leaf).dtype)
    except TypeError as error:
        raise TypeError(
            f"optimizer: leaf {tree.path_name(path)} of its state is "
            f"{type(leaf).__name__}, but must be an array, a number or a PRNG key. "
            "Hold it outside of the state that init returns."
        ) from error


def pack_state(update: Update, state: TrainState) -> TrainState:
    """Convert a logical state to the optimizer's packed form."""
    params, opt_state = update.pack(state.params, state.opt_state)
    return dataclasses.replace(state, params=params, opt_state=opt_state)


def unpack_state(update: Update, packed: TrainState) -> TrainState:
    """Undo `pack_state`."""
    params, opt_state = update.unpack(packed.params, packed.opt_state)
    return dataclasses.replace(packed, params=params, opt_state=opt_state)


def packed_structs(
    update: Update, abstract: TrainState, shardings: TrainState
) -> TrainState:
    """Describe the packed state.

    Args:
      update: the optimizer.
      abstract: the logical state's shapes.
      shardings: the logical state's shardings.

    Returns:
      Shapes, dtypes and shardings of the result of `pack_state`.
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
    update: Update | None = None,
    carried: Sequence[Carried] = (),
) -> TrainState:
    """Choose the sharding of every leaf of the state.

    An optimizer leaf whose path ends with a parameter's and whose shape is the same
    has that parameter's sharding (masked and nested transformations too); any other
    (such as Adafactor's rows and columns) is sharded by the same rules. Typed PRNG keys
    are replicated.

    Args:
      abstract: the state's shapes.
      leaf_shardings: parameter name -> sharding.
      zero: the row of the ZeRO table.
      mesh: the mesh.
      update: the optimizer, which may choose other memory kinds; None for the device.
      carried: the parts of ``state.carried``, of which some may be per shard.

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
    ruled = placed(abstract.params), placed(abstract.opt_state)
    params, opt_state = update.logical_shardings(*ruled) if update else ruled
    held = abstract.carried
    per_shard = {
        part.name: shard_part_shardings(part, held[part.name], mesh)
        for part in carried
        if part.per_shard
    }
    logical = {name: part for name, part in held.items() if name not in per_shard}
    return dataclasses.replace(
        replicated,
        params=params,
        frozen=placed(abstract.frozen),
        opt_state=opt_state,
        carried=placed(logical) | per_shard,
    )


def filled_in(read: TrainState, own: TrainState) -> TrainState:
    """A partly read state, with `own` leaves where `read` has structs."""
    return jax.tree.map(
        lambda new, old: new if isinstance(new, jax.Array) else old, read, own
    )


def require_sound(state: TrainState) -> None:
    """Raise if training can't continue from a state; waits for the devices.

    Args:
      state: the state.

    Raises:
      FloatingPointError: if a parameter is not finite, or another leaf is NaN (other
        leaves may use an infinity for "none yet").
    """
    leaves = {
        name: leaf
        for name, leaf in tree.named_leaves(state).items()
        if jnp.issubdtype(leaf.dtype, jnp.floating)
    }
    bad: dict[str, Any] = {}
    for part in _by_devices(leaves):
        bad |= jax.device_get(_unsound(part))
    wrong = [name for name in leaves if bad[name]]
    if wrong:
        more = f" and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        raise FloatingPointError(
            f"the state is not finite: {', '.join(wrong[:5])}{more}. Nothing was "
            "saved; go back to the last checkpoint."
        )


def _by_devices(leaves: Mapping[str, jax.Array]) -> list[dict[str, jax.Array]]:
    """Leaves that a program can take together: what is on disk is on other devices."""
    found: dict[frozenset, dict[str, jax.Array]] = {}
    for name, leaf in leaves.items():
        found.setdefault(frozenset(leaf.sharding.device_set), {})[name] = leaf
    return list(found.values())


@jax.jit
def _unsound(leaves: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Leaf name -> whether it is not finite, or NaN outside of params."""

    def is_bad(name: str, leaf: jax.Array) -> jax.Array:
        leaf = to_device(leaf)
        is_param = name.startswith("params/")
        return jnp.any(~jnp.isfinite(leaf) if is_param else jnp.isnan(leaf))

    return {name: is_bad(name, leaf) for name, leaf in leaves.items()}
