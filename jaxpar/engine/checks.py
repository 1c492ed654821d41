"""Which errors in the arguments can be found before tracing?"""

import numbers
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxpar import tree
from jaxpar.engine.placement import Placement
from jaxpar.mesh import EXPERT, TENSOR
from jaxpar.sharding.leaf_sharding import LeafSharding
from jaxpar.sharding.rules import AxisRules, axes_of
from jaxpar.sharding.tensor import AXIS_NAMES
from jaxpar.step.carried import Carried, Stepped, check_carried
from jaxpar.step.state import TrainState
from jaxpar.step.update import StoresApart, Update
from jaxpar.types import Params, PyTree


def check_arguments(
    optimizer: Any,
    clip_norm: float | None,
    seed: int,
    carried: Sequence[Any],
) -> None:
    """Check the arguments of `jaxpar.initialize` that no other module checks.

    Args:
      optimizer: the optimizer.
      clip_norm: the largest global norm of the gradients, or None.
      seed: the run's seed.
      carried: the parts that the user adds to the state.

    Raises:
      ValueError: if a value is out of range.
      TypeError: if `optimizer` is neither an optax transformation nor one that makes
        its own update, or a part of `carried` is not one.
    """
    if not isinstance(seed, int) or not 0 <= seed < 2**32:
        raise ValueError(
            f"seed={seed!r} must be an integer from 0 to 2**32 - 1: jax uses 32 bits "
            "of it, so another seed would give the same key as one of these."
        )
    _check_optimizer(optimizer)
    check_carried(carried)
    if clip_norm is not None and not clip_norm > 0:
        raise ValueError(
            f"clip_norm={clip_norm!r} must be positive, or None for no clipping."
        )


def _check_optimizer(optimizer: Any) -> None:
    makes_updates = hasattr(optimizer, "update") or hasattr(optimizer, "make_update")
    if hasattr(optimizer, "init") and makes_updates:
        return
    shown, remedy = repr(optimizer), "call its factory, as in optax.adamw(1e-3)"
    if isinstance(optimizer, numbers.Real):
        remedy = f"pass a learning rate to one, as in optax.adamw({optimizer})"
    elif hasattr(optimizer, "tx"):
        shown = f"{type(optimizer).__name__}(...)"
        remedy = "pass the one inside it, optimizer=tx for nnx.Optimizer(model, tx)"
    elif callable(optimizer):
        remedy += ", and pass a schedule to it, as in optax.adamw(schedule)"
    raise TypeError(
        f"optimizer={shown} must be an optax transformation, with init and update, or "
        "make its own update, with init and make_update (jaxpar.optim.MakesUpdate); "
        f"{remedy}."
    )


def check_trainable(params: Params) -> None:
    """Check that every parameter can have a gradient and an fp32 master.

    Args:
      params: shapes of the parameters, in the model's dtypes.

    Raises:
      ValueError: if there are none, or one is not of a real floating dtype.
    """
    named = tree.named_leaves(params)
    if not named:
        raise ValueError(
            "model: it has no parameters to train (nnx.Param, or Linen's params)."
        )
    for name, leaf in named.items():
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise ValueError(
                f"model: parameter {name} is {leaf.dtype}, but a parameter must be "
                "floating to be trained. Make it another kind of nnx.Variable, or put "
                "it into another Linen collection than params."
            )


def of_trained(
    init: Callable[[Params], PyTree], frozen: Params
) -> Callable[[Params], PyTree]:
    """An optimizer's init, which names what it may not mask.

    Args:
      init: the optimizer's, of the parameters that are trained.
      frozen: those that are not.
    """
    if not frozen:
        return init

    def of_params(params: Params) -> PyTree:
        try:
            return init(params)
        except (ValueError, KeyError, TypeError) as error:
            names = ", ".join(list(tree.named_leaves(frozen))[:3])
            raise ValueError(
                "optimizer: its init fails on the trainable parameters alone. Frozen "
                f"ones ({names}) are not in its tree: leave them out of its masks and "
                "labels, for trainable= freezes them."
            ) from error

    return of_params


def check_elements(params: Params, mesh: Mesh) -> None:
    """Raise for a parameter of size 0 on several devices.

    Raises:
      ValueError: if there is one.
    """
    for name, leaf in tree.named_leaves(params).items():
        if not leaf.size and mesh.size > 1:
            raise ValueError(
                f"model: parameter {name} has shape {leaf.shape} and no elements; "
                "XLA crashes on it in programs of several devices (jax 0.11.2). "
                "Leave it out of the model, or train on one device."
            )


def check_axes(
    leaves: Mapping[str, LeafSharding], mesh: Mesh, flax_rules: AxisRules
) -> None:
    """Check that each axis of the mesh splits something.

    A tensor axis that no rule uses only stores shards and gathers them, which may be
    meant where a batch has few rows; it is warned of.

    Args:
      leaves: parameter name -> sharding.
      mesh: the mesh.
      flax_rules: the model's, which may split activations alone.

    Raises:
      ValueError: if the mesh has several devices on expert, and no rule uses it.
    """
    split = {
        axis
        for leaf in leaves.values()
        for own in leaf.compute
        for axis in axes_of(own)
    }
    ruled = {AXIS_NAMES.get(axis) for _, own in flax_rules for axis in axes_of(own)}
    experts, ways = mesh.shape.get(EXPERT, 1), mesh.shape[TENSOR]
    if experts > 1 and EXPERT not in split:
        raise ValueError(
            f"mesh: expert={experts}, but no rule splits a parameter over it; name the "
            "experts' dim, rules={'expert': 'expert'} or {'*/experts/*': "
            "jax.P('expert')}, or give these devices to data."
        )
    if ways > 1 and TENSOR not in split | ruled:
        warnings.warn(
            f"mesh: tensor={ways}, but no rule splits a parameter over it, so that its "
            "devices store shards and all compute the same; split some, "
            "rules={'*/kernel': jax.P(None, 'tensor')}, or give these devices to data.",
            stacklevel=6,
        )


def check_carried_reads(
    update: Update, carried: Sequence[Carried], abstract: TrainState
) -> None:
    """Check that no part of the state needs parameters that programs don't have.

    Args:
      update: the optimizer.
      carried: the parts of ``state.carried``.
      abstract: the state's shapes.

    Raises:
      ValueError: if the update stores parameters apart, such as on disk, and a part
        reads them after a step.
    """
    if not isinstance(update, StoresApart):
        return
    yes = jax.ShapeDtypeStruct((), jnp.bool_)
    for part in carried:
        held = abstract.carried[part.name]
        traced = jax.make_jaxpr(
            lambda params, held, yes, part=part: part.after(
                held, Stepped(params, params, yes, yes, yes, {part.name: held})
            )
        )(abstract.params, held, yes).jaxpr
        read = {id(x) for eqn in traced.eqns for x in eqn.invars}
        read |= set(map(id, traced.outvars))
        own = traced.invars[: len(jax.tree.leaves(abstract.params))]
        if read & set(map(id, own)):
            raise ValueError(
                f"carried: the part {part.name!r} reads the parameters after a step, "
                "and those of Offload(optimizer='disk') are on disk; leave it out, or "
                "store them with Offload(optimizer='host')."
            )


def check_same_state(own: Placement, first: Placement) -> None:
    """Check that batches of other shapes train the same state.

    Args:
      own: where the state would be stored, by the shapes of a batch.
      first: where it is, by those of `sample_batch`.

    Raises:
      ValueError: if leaves have other shapes, or are stored otherwise.
    """
    found, right = (tree.named_leaves(x.abstract) for x in (own, first))
    for name in sorted(found.keys() ^ right.keys()):
        raise ValueError(
            f"the state has a leaf {name} with these shapes or with those of "
            "sample_batch, not with both; a state that several shapes train must not "
            "depend on them."
        )
    for name, leaf in found.items():
        one, other = ((x.dtype, x.shape) for x in (leaf, right[name]))
        if one != other:
            raise ValueError(
                f"leaf {name} of the state is {leaf.dtype}{list(leaf.shape)} with "
                f"these shapes, but {right[name].dtype}{list(right[name].shape)} with "
                "those of sample_batch; give the model a size that does not depend on "
                "the batch's, such as the longest seq_len."
            )
    assert own.leaves == first.leaves, "rules are of names and shapes alone"


def check_fetched(update: Update, by_layer: frozenset[str]) -> None:
    """Check that parameters that are fetched a layer at a time are read so.

    Args:
      update: that of `sample_batch`.
      by_layer: names of the parameters that loss functions read so, by the shapes of
        another batch.

    Raises:
      ValueError: if one is read otherwise.
    """
    others = update.fetched - by_layer
    if others:
        raise ValueError(
            f"parameter {min(others)} is fetched a layer at a time for sample_batch, "
            "but with these shapes the model reads it otherwise; use one shape, or "
            "Offload(params=None)."
        )


def check_micro_batches(update: Update, accumulate: int) -> None:
    """Check that gradients that leave the devices layer by layer leave once a step.

    Raises:
      ValueError: if a step has several micro-batches, which would write each other's.
    """
    if update.layer_stores() and accumulate > 1:
        raise ValueError(
            f"accumulate={accumulate} must be 1 with Offload(params='disk'): layers' "
            "gradients are written to disk as they are computed, once a step. Use "
            "remat='full' or 'offload' for a larger batch, or params='host'."
        )


def check_choices(update: Update, *, draws_alike: bool) -> None:
    """Check a loss that leaves layers out.

    Args:
      update: the optimizer.
      draws_alike: whether all data shards leave the same ones out.

    Raises:
      ValueError: if they don't, and would wait for each other's collectives; or if
        gradients are written to disk by layer: a layer that is left out has none, and
        that of an earlier step would be read.
    """
    if not draws_alike:
        raise ValueError(
            "layer_drop must be None here: all data shards must leave the same layers "
            "out, but every shard draws from a key of its own, because packs have keys "
            "of their own or no row dim can be proved (see jaxpar.step.row_draws). Use "
            "data=1, batches that are not jaxpar.Packed, or a loss of any number of "
            "rows."
        )
    if update.layer_stores():
        raise ValueError(
            "layer_drop must be None with Offload(params='disk'): layers' gradients "
            "are written to disk as they are computed, and a layer that is left out "
            "has none to write. Use params='host'."
        )
