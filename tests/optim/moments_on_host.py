"""An optax transformation whose state is stored in the host's memory.

Inside the jitted step it is copied to the device and back. What an update must do for
that is choose the memory kind (`logical_shardings`), and copy (`apply`).
"""

import dataclasses
from typing import Any

import jax
import optax

from jaxpar.optim import Update, UpdateSpec
from jaxpar.optim.make_update import make_update


@dataclasses.dataclass(frozen=True)
class MomentsOnHost:
    inner: optax.GradientTransformation
    packed_only: bool = False

    def init(self, params: Any) -> Any:
        return self.inner.init(params)

    def make_update(self, spec: UpdateSpec) -> Update:
        own = PackedOnHost if self.packed_only else HostMoments
        return own(make_update(self.inner, spec))


@dataclasses.dataclass(frozen=True)
class HostMoments(Update):
    inner: Update

    def logical_shardings(self, params: Any, opt_state: Any) -> Any:
        host = jax.tree.map(lambda x: x.with_memory_kind("pinned_host"), opt_state)
        return params, host

    def apply(self, grads, params, opt_state, **given):
        here = jax.device_put(opt_state, jax.memory.Space.Device)
        params, here, metrics = self.inner.apply(grads, params, here, **given)
        return params, jax.device_put(here, jax.memory.Space.Host), metrics


class PackedOnHost(HostMoments):
    """The same, but users see the state on the device."""

    def logical_shardings(self, params: Any, opt_state: Any) -> Any:
        return params, opt_state

    def shardings(self, params: Any, opt_state: Any) -> Any:
        return HostMoments.logical_shardings(self, params, opt_state)
