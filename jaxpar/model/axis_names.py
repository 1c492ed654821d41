"""How is a loss function run that uses an unbound axis name?

Models written for ``jax.pmap`` average over its axis: flax's ResNet has
``BatchNorm(axis_name="batch")``. The axis stands for all examples of the batch. So such
a loss couples examples and sees full micro-batches, and its axis names are bound to
axes of size one: ``pmean`` and ``psum`` over them are the identity.
"""

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax

from jaxpar.model.bridge import Network
from jaxpar.sharding.rules import AxisRules
from jaxpar.types import Batch, LossFn, Params, PyTree

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class BoundNetwork:
    """A network with axis names bound for its loss function.

    Attributes:
      network: the model.
      axis_names: the names, each bound to an axis of size one.
    """

    network: Network
    axis_names: tuple[str, ...]

    @property
    def axis_rules(self) -> AxisRules:
        """See `Network`."""
        return self.network.axis_rules

    @property
    def former_names(self) -> Sequence[tuple[str, str]]:
        """See `Network`."""
        return self.network.former_names

    def init(self, key: jax.Array) -> tuple[Params, PyTree]:
        """See `Network`."""
        return self._bound(lambda key: self.network.init(key), key)

    def dim_names(self) -> dict[str, Sequence[Any] | None]:
        """See `Network`."""
        names: dict[str, Sequence[Any] | None] = {}
        self._bound(lambda _: names.update(self.network.dim_names()), 0)
        return names

    def run(
        self,
        fn: LossFn,
        variables: tuple[Params, PyTree],
        key: jax.Array,
        batch: Batch,
        *,
        training: bool,
        step: Any = None,
    ) -> tuple[Any, PyTree]:
        """See `Network`."""

        def run(variables: tuple, key: jax.Array, batch: Batch) -> tuple:
            how = {"training": training, "step": step}
            return self.network.run(fn, variables, key, batch, **how)

        return self._bound(run, variables, key, batch)

    def _bound(self, fn: Callable[..., Any], *args: Any) -> Any:
        """Call ``fn(*args)`` with the names bound."""
        for name in self.axis_names:
            fn = jax.vmap(fn, in_axes=None, axis_name=name, axis_size=1)
        drop = len(self.axis_names)
        return jax.tree.map(lambda x: x.reshape(x.shape[drop:]), fn(*args))


def bind_axes(network: Network, trace: Callable[[Network], T]) -> tuple[Network, T]:
    """Trace a network, binding the axis names that its loss function uses.

    Args:
      network: the model.
      trace: calls the network.

    Returns:
      The network, as a `BoundNetwork` if a name is bound, and the result of `trace`.

    Example:
      >>> from flax import nnx
      >>> from jaxpar.model.bridge import make_network
      >>> loss = lambda model, batch: jax.lax.pmean(model(batch).mean(), "batch")
      >>> model = make_network(lambda rngs: nnx.Linear(2, 1, rngs=rngs), loss, None)
      >>> rows, key = jax.numpy.zeros((4, 2)), jax.random.key(0)
      >>> def run(network):
      ...     return network.run(loss, network.init(key), key, rows, training=True)[0]
      >>> network, value = bind_axes(model, run)
      >>> network.axis_names, float(value)
      (('batch',), 0.0)
    """
    while True:
        try:
            return network, trace(network)
        except NameError as error:
            network = _with_axis(network, error)


def unbound_axis(error: NameError) -> str | None:
    """The axis name that a JAX error reports as unbound; None for other errors."""
    found = re.search(r"unbound axis name: ([^\s.]+)", str(error))
    return found[1] if found else None


def _with_axis(network: Network, error: NameError) -> BoundNetwork:
    """Bind the axis that an error names; raises the error if it names none."""
    name = unbound_axis(error)
    bound = network if isinstance(network, BoundNetwork) else BoundNetwork(network, ())
    if name is None or name in bound.axis_names:
        raise error
    return dataclasses.replace(bound, axis_names=(*bound.axis_names, name))
