"""Where does everything of a run lie, and how is its step compiled: decided once.

What `jaxpar.initialize` works out before anything is placed, and `Engine` asks for when
it places, restores and explains.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh

from jaxpar.mesh import are_present
from jaxpar.plan.explain import Explanation, make_explanation
from jaxpar.plan.program import read_program
from jaxpar.sharding.zero import LeafPlan, ZeroStage
from jaxpar.state import TrainState
from jaxpar.xla_settings import Setting


@dataclasses.dataclass(frozen=True)
class Layout:
    """The state's shapes and places, and the settings of the step.

    Attributes:
      mesh: the mesh.
      abstract: the train state's shapes.
      shardings: where its leaves rest.
      plans: parameter name -> plan.
      stage: the row of the ZeRO table.
      coupled: whether the loss couples examples.
      scales_loss: whether the loss is scaled (fp16).
      settings: the compiler's options.
      notes: what a pipeline adds to an explanation.
    """

    mesh: Mesh
    abstract: TrainState
    shardings: TrainState
    plans: dict[str, LeafPlan]
    stage: ZeroStage
    coupled: bool
    scales_loss: bool
    settings: tuple[Setting, ...]
    notes: tuple[str, ...]

    @functools.cached_property
    def can_run(self) -> bool:
        """Whether the mesh's devices are here, and not only to compile for."""
        return are_present(self.mesh)

    def structs(self) -> TrainState:
        """The state's shapes, dtypes and shardings."""
        return jax.tree.map(
            lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
            self.abstract,
            self.shardings,
        )

    def initial_state(
        self, init: Callable[[jax.Array], TrainState], seed: int
    ) -> TrainState:
        """Initialise the state, sharded; `structs` where the devices are not here."""
        if not self.can_run:
            return self.structs()
        return jax.jit(init, out_shardings=self.shardings)(jax.random.key(seed))

    def require_devices(self, call: str) -> None:
        """Refuse what runs something on devices that are only to compile for.

        Raises:
          RuntimeError: if the mesh's devices are not here.
        """
        if not self.can_run:
            device = self.mesh.devices.flat[0]
            raise RuntimeError(
                f"{call}: this engine's mesh is of {self.mesh.size} "
                f"{device.device_kind} that are not here: it can explain() and "
                "lower() its step, not run it. Make the mesh of jax.devices() to run."
            )

    def explain(self, compiled: Any) -> Explanation:
        """Explain the compiled step."""
        return make_explanation(
            self.abstract,
            self.shardings,
            self.plans,
            self.stage,
            coupled=self.coupled,
            program=read_program(compiled, self.mesh),
            settings=self.settings,
            notes=self.notes,
        )
