"""Which reduction runs, and where can it not: checked before anything compiles."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxpar import tree
from jaxpar.mesh import (
    EXPERT,
    PIPE,
    REPLICA,
    batch_axes,
    num_batch_shards,
    on_abstract_mesh,
    rows_spec,
)
from jaxpar.optim.check_update import require_same
from jaxpar.optim.quantized_sums import QuantizedSums
from jaxpar.sharding.leaf_sharding import LeafSharding
from jaxpar.step.partition import Partition
from jaxpar.step.reduction import (
    PLAIN,
    LocalGradients,
    PlainReduction,
    Reduction,
    Wire,
)
from jaxpar.step.reduction_part import of_own_part
from jaxpar.step.update import Update
from jaxpar.types import PyTree


def with_coded_gradients(update: Update, partition: Partition) -> Update:
    """An update whose gradients are coded, if the ZeRO stage says so.

    Raises:
      ValueError: if ZeRO++ can't run here.
    """
    plus, mesh, wants = partition.zero.plus, partition.mesh, "zero=ZeroPlusPlus"
    if plus is None:
        return update
    if plus.secondary and mesh.shape.get(REPLICA, 1) == 1:
        raise ValueError(
            "zero: secondary=True of ZeroPlusPlus splits the state over replicas, but "
            "the mesh has one; use jaxpar.MeshShape(replica=2, data=...), a replica "
            "for each host, or secondary=False."
        )
    if partition.coupled:
        raise ValueError(
            f"{wants} can't run with examples that are coupled: the compiler then "
            "makes the collectives. Use a loss of independent examples "
            f"(coupled_batch=False, no batch statistics), or zero={plus.stage}."
        )
    if update.fetched:
        raise ValueError(
            f"{wants} can't run with Offload(params=...), whose parameters come from "
            f"the host; use zero={plus.stage}, or params=None."
        )
    codes = plus.gradients
    if codes is None or partition.automatic:
        return update
    if type(update.reduction) is not PlainReduction:
        raise ValueError(
            f"zero: gradient_bits={plus.gradient_bits} must be None with an optimizer "
            f"that brings a reduction, {type(update.reduction).__name__}."
        )
    assert dataclasses.is_dataclass(update), "as updates with a reduction are"
    inside = plus.gradients_inside or codes
    own = QuantizedSums(codes, inside, plus.error_decay, plus.reset_every)
    return dataclasses.replace(update, reduction=own)


def choose_reduction(
    reduction: Reduction, partition: Partition, leaves: Sequence[LeafSharding]
) -> Reduction:
    """Check the reduction that an update brings.

    Args:
      reduction: the update's.
      partition: how the loss function is run on shards.
      leaves: the trained leaves as a data shard communicates them.

    Returns:
      The reduction, or on one data shard the plain one, unless the update exchanges
      gradients itself.

    Raises:
      ValueError: if it can't run at this ZeRO stage, with coupled examples or in this
        precision; if it returns other shapes than a reduction must, or says that it
        communicates nothing.
    """
    if isinstance(reduction, PlainReduction):
        if reduction.apart and partition.coupled:
            raise _refusal(reduction, *_COUPLED)
        return reduction
    is_local = isinstance(reduction, LocalGradients)
    if num_batch_shards(partition.mesh) == 1:
        return reduction if is_local else PLAIN
    _check_place(reduction, partition, is_local=is_local)
    _check_shapes(reduction, partition, leaves)
    own = partition.precision
    sizes, itemsize = partition.mesh.shape, own.reduce_dtype.itemsize
    if not is_local and not reduction.communicated(leaves, Wire(sizes, itemsize)):
        raise ValueError(
            f"optimizer: {type(reduction).__name__}.communicated returns nothing on a "
            f"mesh of {num_batch_shards(partition.mesh)} data shards, but a reduction "
            "sends gradients between them. Return the bytes of its collectives, by "
            "axes and kind: engine.verify() holds the program to them."
        )
    return reduction


_COUPLED = (
    "examples that are coupled",
    "the compiler then reduces the gradients",
    "Use a loss of independent examples (coupled_batch=False, no batch statistics), or "
    "an optimizer without a reduction of its own",
)


def _refusal(reduction: Reduction, where: str, why: str, remedy: str) -> ValueError:
    return ValueError(
        f"optimizer: its reduction, {type(reduction).__name__}, can't run with "
        f"{where}: {why}. {remedy}."
    )


def _check_place(reduction: Reduction, partition: Partition, *, is_local: bool) -> None:
    """Raise where it would never be called."""
    zero, pipes = partition.zero, partition.mesh.shape[PIPE]
    if partition.coupled:
        raise _refusal(reduction, *_COUPLED)
    once = zero.number == 2 and reduction.at_zero2
    if zero.reduce != "step" and pipes == 1 and not once:
        raise _refusal(
            reduction,
            f"zero={zero.number}",
            "the backward pass then reduces every micro-batch's gradients",
            "Use zero=1, which reduces once a step",
        )
    split = [leaf.name for leaf in partition.leaves if leaf.dim_of(EXPERT) is not None]
    if is_local and (pipes > 1 or split):
        raise _refusal(
            reduction,
            f"pipe={pipes}" if pipes > 1 else f"experts ({split[0]})",
            "gradients of a leaf would be of several stages or experts",
            "Use pipe=1 and no expert axis, or a reduction that returns sums",
        )


def _check_shapes(
    reduction: Reduction, partition: Partition, leaves: Sequence[LeafSharding]
) -> None:
    """Raise unless it returns what the plain one does, and carries what it is given."""
    mesh, name = partition.mesh, type(reduction).__name__

    def traced(by: Reduction) -> tuple[PyTree, PyTree]:
        def body(carry: PyTree) -> tuple:
            grads = [jnp.zeros(leaf.shape, jnp.float32) for leaf in leaves]
            found, carry = by.reduce(leaves, grads, carry, partition.collectives)
            return dict(zip(names, found, strict=True)), carry

        rows = rows_spec(mesh)
        names = [leaf.name for leaf in leaves]
        specs = dict(zip(names, map(by.out_spec, leaves), strict=True))
        run = jax.shard_map(
            of_own_part(body),
            mesh=mesh,
            in_specs=rows,
            out_specs=(specs, rows),
            axis_names=set(batch_axes(mesh)),
            check_vma=False,
        )
        with on_abstract_mesh(mesh):
            return jax.eval_shape(run, jax.eval_shape(lambda: carried(by)))

    def carried(by: Reduction) -> PyTree:
        shards = num_batch_shards(mesh)
        return jax.tree.map(
            lambda x: jnp.broadcast_to(x, (shards, *jnp.shape(x))), by.init(leaves)
        )

    found, carry = traced(reduction)
    same = f"{name}.reduce", "`init` makes"
    require_same(*same, jax.eval_shape(lambda: carried(reduction)), carry)
    if not isinstance(reduction, LocalGradients):
        fp32 = jnp.dtype(jnp.float32)
        plain, _ = traced(PLAIN)
        right, sums = (tree.with_dtype(x, fp32) for x in (plain, found))
        require_same(f"{name}.reduce", "a reduction must return", right, sums)
