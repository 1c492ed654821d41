"""Which `Update` runs an optimizer: its own, or that of optax transformations?"""

import optax

from jaxpar.mesh import DATA
from jaxpar.optim.check_update import check_update
from jaxpar.optim.optax_update import OptaxUpdate
from jaxpar.optim.trace_update import trace_update
from jaxpar.step.update import HostUpdate as HostUpdate  # Public, in jaxpar.optim.
from jaxpar.step.update import MakesUpdate, Update, UpdateSpec

Optimizer = optax.GradientTransformation | MakesUpdate


def make_update(optimizer: Optimizer, spec: UpdateSpec) -> Update:
    """Run an optimizer on a mesh.

    Args:
      optimizer: any optax transformation, or an object that makes its own update.
      spec: what is known of the run.

    Raises:
      TypeError: if the optimizer makes something else than an `Update`.
      ValueError: if the update needs arguments or state that a step doesn't support,
        or does not keep what `Update` promises.
    """
    if isinstance(optimizer, MakesUpdate):
        update = optimizer.make_update(spec)
        check_update(update, spec)
        return update
    traced = trace_update(optimizer, spec.params, spec.opt_state)
    loops_over = spec.mesh.shape[DATA] if traced.has_loops else 1
    return OptaxUpdate(optimizer, traced.extras, loops_over)
