"""Which errors in the arguments can be found before tracing?"""

import numbers
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax.sharding import AxisType, Mesh

from jaxpar import tree
from jaxpar.mesh import AXES
from jaxpar.step.carried import check_carried
from jaxpar.types import Params


def check_arguments(
    mesh: Mesh,
    optimizer: Any,
    clip_norm: float | None,
    seed: int,
    carried: Sequence[Any],
) -> None:
    """Check the arguments of `jaxpar.initialize` that no other module checks.

    Args:
      mesh: the mesh.
      optimizer: the optax transformation.
      clip_norm: the largest global norm of the gradients, or None.
      seed: the run's seed.
      carried: the parts that the user adds to the state.

    Raises:
      ValueError: if a value is out of range, or the mesh lacks jaxpar's axes.
      TypeError: if `optimizer` is not an optax transformation, or a part of `carried`
        not one.
    """
    if not isinstance(seed, int) or not 0 <= seed < 2**32:
        raise ValueError(
            f"seed={seed!r} must be an integer from 0 to 2**32 - 1: jax uses 32 bits "
            "of it, so another seed would give the same key as one of these."
        )
    if mesh.axis_names != AXES or set(mesh.axis_types) != {AxisType.Auto}:
        raise ValueError(
            f"mesh: its axes are {mesh.axis_names} of types {mesh.axis_types}, but "
            f"must be {AXES}, all automatic. Pass a jaxpar.MeshShape, or make the mesh "
            "by jaxpar.make_mesh."
        )
    _check_optimizer(optimizer)
    check_carried(carried)
    if clip_norm is not None and not clip_norm > 0:
        raise ValueError(
            f"clip_norm={clip_norm!r} must be positive, or None for no clipping."
        )


def _check_optimizer(optimizer: Any) -> None:
    if hasattr(optimizer, "init") and hasattr(optimizer, "update"):
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
        f"optimizer={shown} must be an optax transformation, with init and update; "
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
