"""A new optimizer, as its writer would add one: outside the package.

Sign descent with momentum, stored in bf16: ``m = bf16(b * m + (1 - b) * grad)`` and
``param -= rate * sign(m)``. The logical state has the momentum in fp32, so that its
checkpoints do not depend on how it is stored.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxpar.optim import Update, UpdateSpec


@dataclasses.dataclass(frozen=True)
class SignMomentum:
    rate: float
    decay: float = 0.9

    def init(self, params: Any) -> Any:
        return {"momentum": jax.tree.map(jnp.zeros_like, params), "count": jnp.int32(0)}

    def make_update(self, spec: UpdateSpec) -> Update:
        del spec
        return SignUpdate(self)


@dataclasses.dataclass(frozen=True)
class SignUpdate(Update):
    optimizer: SignMomentum

    def pack(self, params: Any, opt_state: Any) -> Any:
        return params, _with_momentum(opt_state, jnp.bfloat16)

    def unpack(self, params: Any, opt_state: Any) -> Any:
        return params, _with_momentum(opt_state, jnp.float32)

    def apply(self, grads, params, opt_state, *, factor, applied, loss):
        del loss
        rate, decay = self.optimizer.rate, self.optimizer.decay

        def moved(m: jax.Array, grad: jax.Array) -> jax.Array:
            new = decay * m.astype(jnp.float32) + (1 - decay) * factor * grad
            return new.astype(m.dtype)

        def stepped(param: jax.Array, m: jax.Array) -> jax.Array:
            return param - rate * jnp.sign(m).astype(jnp.float32)

        momentum = jax.tree.map(moved, opt_state["momentum"], grads)
        counted = {"momentum": momentum, "count": opt_state["count"] + 1}
        after = jax.tree.map(stepped, params, momentum), counted
        params, opt_state = optax.tree.where(applied, after, (params, opt_state))
        return params, opt_state, {"learning_rate": jnp.float32(rate)}


def _with_momentum(opt_state: Any, dtype: Any) -> Any:
    if not opt_state:
        return opt_state
    cast = jax.tree.map(lambda x: x.astype(dtype), opt_state["momentum"])
    return {**opt_state, "momentum": cast}


def plain(rate: float, decay: float = 0.9) -> optax.GradientTransformation:
    """The same rule as an optax transformation, its state in bf16."""

    def init(params: Any) -> Any:
        return jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.bfloat16), params)

    def update(grads: Any, momentum: Any, params: Any = None) -> Any:
        del params
        momentum = jax.tree.map(
            lambda m, g: (decay * m.astype(jnp.float32) + (1 - decay) * g).astype(
                m.dtype
            ),
            momentum,
            grads,
        )
        signs = jax.tree.map(
            lambda m: -rate * jnp.sign(m).astype(jnp.float32), momentum
        )
        return signs, momentum

    return optax.GradientTransformation(init, update)
