"""What does an optimizer's update need and return, according to one trace?

optax lets an update take more arguments than gradients, and hold state of any kind.
Arguments and state that a training step does not support raise here, before compiling.
"""

import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxpar import tree
from jaxpar.optim.loops import has_loops
from jaxpar.types import Params, PyTree

EXTRAS = ("value", "grad")
"""Keyword arguments that an update gets if it takes them: loss and gradients."""


@dataclasses.dataclass(frozen=True)
class UpdateTrace:
    """The results of tracing an update.

    Attributes:
      extras: which of `EXTRAS` it takes.
      has_loops: whether a loop in it multiplies matrices.
    """

    extras: tuple[str, ...]
    has_loops: bool


def trace_update(
    optimizer: optax.GradientTransformation, params: Params, opt_state: PyTree
) -> UpdateTrace:
    """Trace an optimizer's update on shapes and check its arguments and results.

    Args:
      optimizer: the transformation.
      params: shapes of the parameters; gradients have the same.
      opt_state: shapes of its state.

    Returns:
      The results of the trace.

    Raises:
      ValueError: if it needs other arguments than `EXTRAS`, fails, returns updates
        of other shapes than the parameters', or changes structure, shapes or dtypes of
        its state.
    """
    takes_none = isinstance(optimizer, optax.GradientTransformation) and not isinstance(
        optimizer, optax.GradientTransformationExtraArgs
    )
    given = {"value": jax.ShapeDtypeStruct((), jnp.float32), "grad": params}
    extras = () if takes_none else EXTRAS
    while True:
        named = {name: given[name] for name in extras}
        try:
            closed, (updates, new_state) = jax.make_jaxpr(
                functools.partial(_update, optimizer), return_shape=True
            )(params, opt_state, named)
        except (AttributeError, TypeError, ValueError) as error:
            kept = tuple(name for name in extras if not _rejects(error, name))
            if kept == extras:
                raise ValueError(_refusal(error)) from error
            extras = kept
        else:
            break
    _check_updates(params, updates)
    _check_state(opt_state, new_state)
    return UpdateTrace(extras, has_loops(closed.jaxpr))


def _update(
    optimizer: optax.GradientTransformation, params: Params, state: PyTree, named: dict
) -> tuple[PyTree, PyTree]:
    return optimizer.update(params, state, params, **named)


def _rejects(error: Exception, name: str) -> bool:
    """Whether an error is about an argument that the function does not take."""
    return f"unexpected keyword argument '{name}'" in str(error)


def _refusal(error: Exception) -> str:
    text = (str(error) or type(error).__name__).splitlines()[0]
    _, _, listed = text.partition("required keyword-only argument")
    missing = re.findall(r"'(\w+)'", listed) or re.findall(
        r"(\w+) must be (?:provided|given|passed)", text
    )
    if missing:
        return (
            f"optimizer: its update needs {' and '.join(missing)}, which a training "
            "step does not have: it calls update once, with gradients, state, "
            "parameters, value= (the loss) and grad=. A line search or a Hessian "
            "estimate would evaluate the loss again. Leave it out, as in optax.lbfgs("
            "learning_rate, linesearch=None), or use another optimizer."
        )
    return (
        f"optimizer: its update fails on this model's shapes: {type(error).__name__}: "
        f"{text.rstrip('.')}. It is called with gradients of the loss over the global "
        "batch, its state and the parameters, and with value= (the loss) and grad= "
        "where it takes them."
    )


def _check_updates(params: Params, updates: PyTree) -> None:
    expected, found = tree.named_leaves(params), tree.named_leaves(updates)
    for name, leaf in expected.items():
        shape = found[name].shape if name in found else None
        if shape not in (leaf.shape, ()):
            raise ValueError(
                f"optimizer: its update returns shape {shape} for parameter {name} of "
                f"shape {leaf.shape}; an update must have its parameter's shape."
            )


def _check_state(before: PyTree, after: PyTree) -> None:
    """Check that the state has the same form after an update."""
    old, new = tree.named_leaves(before), tree.named_leaves(after)
    came = [name for name in new if name not in old]
    went = [name for name in old if name not in new]
    if came or went:
        raise ValueError(
            "optimizer: its update returns a state of other leaves than init: new "
            f"{came[:5]}, gone {went[:5]}. Let init return every leaf that update "
            "returns."
        )
    for name, leaf in old.items():
        if (leaf.shape, leaf.dtype) != (new[name].shape, new[name].dtype):
            raise ValueError(
                f"optimizer: its update turns leaf {name} of its state from "
                f"{_kind(leaf)} into {_kind(new[name])}; it must not change them."
            )
    if jax.tree.structure(before) != jax.tree.structure(after):
        raise ValueError(
            "optimizer: its update returns a state of another structure than init: "
            f"{jax.tree.structure(after)} for {jax.tree.structure(before)}."
        )


def _kind(leaf: Any) -> str:
    return f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"
