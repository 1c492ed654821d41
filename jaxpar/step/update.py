"""How does a step change parameters, and how do they and the optimizer's state lie?

The *logical* state has one leaf a parameter and is what users see and checkpoints hold.
What is *kept* from step to step may lie in another way: an `Update` says how, and takes
the step on it. Any optax transformation keeps the logical state itself.
"""

from typing import Protocol, runtime_checkable

import jax

from jaxpar.sharding.zero import LeafSharding
from jaxpar.types import Metrics, Params, PyTree


@runtime_checkable
class Update(Protocol):
    """An optimizer on a mesh."""

    def pack(self, params: PyTree, opt_state: PyTree) -> tuple[PyTree, PyTree]:
        """Lay the logical parameters and optimizer's state out as they are kept."""
        ...

    def unpack(self, params: PyTree, opt_state: PyTree) -> tuple[PyTree, PyTree]:
        """Undo `pack`."""
        ...

    def shardings(self, params: PyTree, opt_state: PyTree) -> tuple[PyTree, PyTree]:
        """Where what is kept rests, by where the logical state would."""
        ...

    def compute_params(self, params: PyTree) -> Params:
        """The parameters, or copies in the compute dtype, from what is kept."""
        ...

    def pack_grads(self, grads: Params) -> PyTree:
        """Gradients of parameters as `apply` takes them; their norm is the same."""
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
          grads: by `pack_grads`, of any floating dtype.
          params: as kept.
          opt_state: as kept.
          factor: on the gradients: one over the loss's scale, times what clips them.
          applied: whether the step counts; nothing changes where it does not.
          loss: of the step.

        Returns:
          Parameters and the optimizer's state, as kept, and what there is to tell.
        """
        ...

    def with_shardings(self, leaf_shardings: tuple[LeafSharding, ...]) -> "Update":
        """The same of leaves that are laid out in another way, in flattening order."""
        ...

    def notes(self) -> tuple[str, ...]:
        """What there is to say of how the state is kept, a line each."""
        ...
