"""What does an engine's step cost, as compiled here or for hardware elsewhere?"""

import abc
from collections.abc import Mapping
from typing import Any

import jax

from jaxpar.layout import Layout, lower_for
from jaxpar.mesh import PIPE, TENSOR, MeshShape
from jaxpar.plan.apart import call
from jaxpar.plan.budget import Budget, BudgetExceeded, check
from jaxpar.plan.explain import Explanation
from jaxpar.plan.plan import Plan
from jaxpar.plan.target import parse_target


class CompiledStep(abc.ABC):
    """A step that is compiled whenever something is asked about it.

    Args:
      layout: where every leaf is stored, and the step's settings.
      given: what `jaxpar.initialize` was given, to make the engine again elsewhere.

    Attributes:
      layout: as given.
    """

    def __init__(self, layout: Layout, given: Mapping[str, Any]):
        self.layout, self._given = layout, given

    @abc.abstractmethod
    def _traced(self) -> jax.stages.Traced:
        """The step, traced."""

    def lower(self) -> jax.stages.Lowered:
        """Lower the step for the mesh's devices, which need not be here.

        Returns:
          What ``.compile()`` makes the program from. Its arguments are named
          ``state[0]``, ``state[1]`` and so on, and ``batch...``.
        """
        return lower_for(self._traced(), self.layout.mesh)

    def explain(self) -> Explanation:
        """Compile the step, and say what every leaf, axis and the memory cost.

        Returns:
          Text when printed, also in a notebook; `as_json` for programs.
        """
        return self.layout.explain(self.lower().compile())

    def budget(self) -> Budget:
        """Compile the step, and record what it holds and moves now.

        Returns:
          A budget to keep in a file (`Budget.as_json`) and to `verify` against.
        """
        return self.layout.measure(self.lower()).budget()

    def verify(self, budget: Budget | None = None) -> Budget:
        """Compile the step, and hold it to a budget.

        State bytes, bytes that are communicated over each axis by kind of collective,
        and the peak. A loop whose trip count the program does not tell is counted once.

        Args:
          budget: what the step may hold and move, such as `budget` recorded; None for
            what its ZeRO stage, precision and micro-batches mean by design. That
            bounds the state and what is communicated over data, not over tensor and
            pipe, and not what an optimizer moves for itself (Muon).

        Returns:
          What the step holds and moves now, as `budget` does.

        Raises:
          BudgetExceeded: if it is more; the message names the leaves, or the
            operations by their lines in the source.
        """
        measured = self.layout.measure(self.lower())
        allowed = budget or self.layout.budget()
        violations = check(allowed, measured)
        if violations:
            raise BudgetExceeded(violations)
        return measured.budget()

    def plan(
        self,
        target: str,
        *,
        mesh: MeshShape | None = None,
        tokens_per_step: int | None = None,
    ) -> Plan:
        """Compile the step for hardware that need not be here, and say what it costs.

        Compiles in a process of its own, which is sent what `jaxpar.initialize` was
        given, the batch as shapes; nothing is allocated.

        Args:
          target: the devices, such as "h200:8x8", "v5p:4x4x4" or "cpu:8".
          mesh: how they are laid out; None for the engine's mesh, its data axis taking
            the devices left over.
          tokens_per_step: what a step trains on, to report tokens per second.

        Returns:
          The plan.

        Raises:
          ValueError: if there is no such target, or the mesh or the batch does not fit
            it.
          ApartError: if the compiler fails, crashes, or takes more memory than there
            is.
        """
        found = parse_target(target)
        if not self.layout.can_run and mesh is None:
            return self.layout.plan(self._traced(), found, tokens_per_step)
        sizes = self.layout.mesh.shape
        shape = mesh or MeshShape(pipe=sizes[PIPE], tensor=sizes[TENSOR])
        args = (self._given, target, shape, tokens_per_step)
        return call("jaxpar.planner:plan_call", *args, what=f"plan on {target}")
