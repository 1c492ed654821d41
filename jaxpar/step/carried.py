"""What do techniques keep in the train state: named parts, each with its own update.

A part is a tree of arrays under ``state.carried[name]``. It has the same leaves on
every mesh, so that a checkpoint of it restores on any. A leaf whose name ends with a
parameter's, of the same shape, is sharded as that parameter is stored.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import jax

from jaxpar.types import Params, PyTree


@dataclasses.dataclass(frozen=True)
class Stepped:
    """What a training step did, as its carried parts see it.

    Attributes:
      params: the parameters after the step, fp32, by name.
      finite: whether all gradients were finite; a boolean scalar.
      applied: whether the step was applied; a boolean scalar. A step that was not
        applied has the parameters of before.
    """

    params: Params
    finite: jax.Array
    applied: jax.Array


@runtime_checkable
class Carried(Protocol):
    """A part of the state that a technique brings.

    Attributes:
      name: the key in ``state.carried``.
    """

    @property
    def name(self) -> str:
        """See above."""
        ...

    def init(self, params: Params) -> PyTree:
        """Make the part for the initial parameters, fp32; traceable."""
        ...

    def after(self, part: PyTree, stepped: Stepped) -> PyTree:
        """The part after a training step; in automatic mode, on global arrays."""
        ...


def check_carried(parts: Sequence[Any]) -> None:
    """Check the parts that a user passes.

    Raises:
      TypeError: if one is not a `Carried`.
      ValueError: if a name is taken twice, or isn't a name.
    """
    names = {"loss_scale"}  # The engine's own.
    for part in parts:
        if not isinstance(part, Carried):
            raise TypeError(
                f"carried: {part!r} must have a name, init(params) and after(part, "
                "stepped), as jaxpar.Ema(0.999) has."
            )
        if not part.name or "/" in part.name:
            raise ValueError(
                f"carried: {type(part).__name__} is named {part.name!r}; the name is a "
                "key of state.carried: give it letters, and no slash."
            )
        if part.name in names:
            raise ValueError(
                f"carried: {part.name!r} is the name of two parts; name one otherwise, "
                "such as Ema(0.99, name='ema_fast')."
            )
        names.add(part.name)
