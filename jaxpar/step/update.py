"""How does a step update parameters, and in which form is the state stored?

The *logical* state has one leaf a parameter; users see it and checkpoints hold it. The
*packed* state is the one that steps carry, possibly in another form: an `Update`
converts between the two and updates the packed one. For optax transformations both are
the same.
"""

from typing import Protocol, runtime_checkable

import jax

from jaxpar.sharding.zero import LeafSharding
from jaxpar.types import Metrics, Params, PyTree


@runtime_checkable
class Update(Protocol):
    """An optimizer on a mesh."""

    def pack(self, params: PyTree, opt_state: PyTree) -> tuple[PyTree, PyTree]:
        """Convert the logical parameters and optimizer state to the packed form."""
        ...

    def unpack(self, params: PyTree, opt_state: PyTree) -> tuple[PyTree, PyTree]:
        """Undo `pack`."""
        ...

    def shardings(self, params: PyTree, opt_state: PyTree) -> tuple[PyTree, PyTree]:
        """The packed state's shardings, from those of the logical state."""
        ...

    def compute_params(self, params: PyTree) -> Params:
        """The parameters, or copies in the compute dtype, from the packed ones."""
        ...

    def pack_grads(self, grads: Params) -> PyTree:
        """Convert gradients to the form that `apply` takes; the norm is unchanged."""
        ...

    def apply(
        self,
        grads: PyTree,
        params: PyTree,
        opt_state: PyTree,
        *,
        factor: jax.Array,
        applied: jax.Array,
        loss: jax.Array,
    ) -> tuple[PyTree, PyTree, Metrics]:
        """Take a step.

        Args:
          grads: from `pack_grads`, of any floating dtype.
          params: packed.
          opt_state: packed.
          factor: multiplies the gradients: the clipping factor over the loss scale.
          applied: whether to apply the step; if not, nothing changes.
          loss: the step's loss.

        Returns:
          The packed parameters and optimizer state, and metrics.
        """
        ...

    def with_shardings(self, leaf_shardings: tuple[LeafSharding, ...]) -> "Update":
        """The same optimizer for other leaf shardings, in flattening order."""
        ...

    def notes(self) -> tuple[str, ...]:
        """Notes on how the state is stored, a line each."""
        ...
