"""Adam in NumPy, on the host, between the jit of the gradients and that of the step.

Its state is `optax.adam`'s, so that checkpoints go from one to the other. It is stored
in host memory, where each process computes on its own shards.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxpar.optim import HostUpdate, UpdateSpec


@dataclasses.dataclass(frozen=True)
class NumpyAdam:
    rate: float
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8

    def init(self, params: Any) -> Any:
        return optax.adam(self.rate, self.b1, self.b2, self.eps).init(params)

    def make_update(self, spec: UpdateSpec) -> HostUpdate:
        del spec
        return NumpyUpdate(self)


@dataclasses.dataclass(frozen=True)
class NumpyUpdate(HostUpdate):
    optimizer: NumpyAdam

    def logical_shardings(self, params: Any, opt_state: Any) -> Any:
        return params, _on_host(opt_state)

    def grads_shardings(self, params: Any) -> Any:
        return _on_host(params)

    def pack_grads(self, grads: Any) -> Any:
        return jax.tree.map(lambda x: x.astype(jnp.float32), grads)

    def on_host(self, grads, params, opt_state, *, factor, applied, loss):
        del loss
        if not bool(applied):
            return grads, params, opt_state
        adam, rest = opt_state
        own, scale = self.optimizer, np.float32(factor)
        count = np.float32(adam.count) + 1
        first, second = (1 - np.float32(b) ** count for b in (own.b1, own.b2))

        def moved(grad: np.ndarray, mu: np.ndarray, nu: np.ndarray) -> tuple:
            grad = scale * grad
            mu = own.b1 * mu + (1 - own.b1) * grad
            nu = own.b2 * nu + (1 - own.b2) * grad**2
            ratio = mu / first / (np.sqrt(nu / second) + own.eps)
            return -own.rate * ratio, mu, nu

        leaves = [jax.tree.leaves(x) for x in (grads, adam.mu, adam.nu)]
        stepped = [_by_shard(moved, *same) for same in zip(*leaves, strict=True)]
        structure = jax.tree.structure(grads)
        updates, mu, nu = (
            jax.tree.unflatten(structure, leaf) for leaf in zip(*stepped, strict=True)
        )
        counted = _by_shard(lambda x: (x + 1,), adam.count)[0]
        return updates, params, (adam._replace(count=counted, mu=mu, nu=nu), rest)

    def apply(self, grads, params, opt_state, *, factor, applied, loss):
        del factor, loss
        updates = jax.device_put(grads, jax.memory.Space.Device)
        after = optax.apply_updates(params, updates)
        return optax.tree.where(applied, after, params), opt_state, {}


def _on_host(shardings: Any) -> Any:
    return jax.tree.map(lambda x: x.with_memory_kind("pinned_host"), shardings)


def _by_shard(function: Callable[..., tuple], *arrays: jax.Array) -> list[jax.Array]:
    """Call a function of NumPy arrays for each shard that this process has."""
    first, shards = arrays[0], zip(*(x.addressable_shards for x in arrays), strict=True)
    made = [
        [
            jax.device_put(np.asarray(new, first.dtype), same[0].data.sharding)
            for new in function(*(np.asarray(shard.data) for shard in same))
        ]
        for same in shards
    ]
    return [
        jax.make_array_from_single_device_arrays(first.shape, first.sharding, list(new))
        for new in zip(*made, strict=True)
    ]
