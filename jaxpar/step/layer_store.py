"""From where does a loop fetch the layers of a parameter that is in no array?"""

from collections.abc import Iterable
from typing import Protocol, runtime_checkable

import jax


@runtime_checkable
class LayerStore(Protocol):
    """Where the layers of a parameter are, and where their gradients go.

    In place of the parameter a step has the numbers of its layers, int32. Both methods
    are traced, on one device: all mesh axes are manual. Calls of other devices may be
    at the same time.
    """

    def read(
        self, position: jax.Array, number: jax.Array, shape: tuple[int, ...]
    ) -> jax.Array:
        """A device's shard of a layer.

        Args:
          position: of the device, on the mesh in its order.
          number: of the layer.
          shape: of the shard.
        """
        ...

    def write(
        self, position: jax.Array, number: jax.Array, grad: jax.Array
    ) -> jax.Array:
        """Keep a device's shard of a layer's gradient.

        Returns:
          fp32: 0, or NaN if it is not kept.
        """
        ...

    def failure(self) -> OSError | None:
        """What made a call fail since the last time; the call gave NaN.

        A call does not raise: the other devices would wait for its device.
        """
        ...


def raise_failure(stores: Iterable[LayerStore]) -> None:
    """Raise what made calls of some stores fail, once.

    Raises:
      OSError: if one failed.
    """
    failures = [store.failure() for store in stores]
    for failure in failures:
        if failure is not None:
            raise failure
