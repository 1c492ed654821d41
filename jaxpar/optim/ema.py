"""How is a moving average of the parameters kept beside them?"""

import dataclasses

import jax
import jax.numpy as jnp

from jaxpar.step.carried import Carried, Stepped
from jaxpar.types import Params


@dataclasses.dataclass(frozen=True)
class Ema(Carried):
    """An exponential moving average of the parameters, carried in the state.

    It starts as the initial parameters; after each applied step it becomes
    ``decay * average + (1 - decay) * params``, in fp32, stored as the parameters are.
    Evaluate with it: ``engine.evaluate(batch, params=engine.state.carried["ema"])``, or
    by `jaxpar.mean_loss` in a function that `jaxpar.train` calls.

    Attributes:
      decay: from 0 to below 1: the average is over about 1 / (1 - decay) steps.
      name: under which it is in ``state.carried``.

    Raises:
      ValueError: if `decay` is out of range.

    Example:
      >>> Ema(0.999).name
      'ema'

    Source: Polyak and Juditsky, "Acceleration of Stochastic Approximation by Averaging"
    (1992), with an exponential window.
    """

    decay: float
    name: str = "ema"

    def __post_init__(self):
        if not 0 <= self.decay < 1:
            raise ValueError(
                f"Ema: decay={self.decay} must be at least 0 and below 1, such as "
                "0.999 for an average over about 1,000 steps."
            )

    def init(self, params: Params) -> Params:
        """The initial parameters."""
        return params

    def after(self, part: Params, stepped: Stepped) -> Params:
        """The average with the new parameters in it."""

        def average(old: jax.Array, new: jax.Array) -> jax.Array:
            mixed = self.decay * old + (1 - self.decay) * new
            return jnp.where(stepped.applied, mixed, old)

        return jax.tree.map(average, part, stepped.params)
