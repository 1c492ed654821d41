"""Where is the state of a run stored: its shapes and shardings, decided once."""

import dataclasses
import functools
from collections.abc import Callable

import jax
from jax.sharding import Mesh

from jaxpar.mesh import are_present
from jaxpar.sharding.zero import LeafSharding, ZeroStage
from jaxpar.step.state import (
    TrainState,
    pack_state,
    packed_structs,
    state_shardings,
    unpack_state,
)
from jaxpar.step.update import Update


@dataclasses.dataclass(frozen=True)
class Placement:
    """The state's shapes, and where they are stored.

    Attributes:
      mesh: the mesh.
      abstract: the train state's shapes.
      leaf_shardings: parameter name -> plan.
      zero: the row of the ZeRO table.
      update: the optimizer, and how it keeps the state.
    """

    mesh: Mesh
    abstract: TrainState
    leaves: dict[str, LeafSharding]
    zero: ZeroStage
    update: Update

    @functools.cached_property
    def shardings(self) -> TrainState:
        """Where the state's leaves are stored."""
        return state_shardings(self.abstract, self.leaves, self.zero, self.mesh)

    @functools.cached_property
    def can_run(self) -> bool:
        """Whether the mesh's devices are here, and not only to compile for."""
        return are_present(self.mesh)

    def structs(self) -> TrainState:
        """The logical state's shapes, dtypes and shardings."""
        return jax.tree.map(
            lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
            self.abstract,
            self.shardings,
        )

    @functools.cached_property
    def packed(self) -> TrainState:
        """What lies on the devices from step to step: shapes, dtypes and shardings."""
        return packed_structs(self.update, self.abstract, self.shardings)

    @functools.cached_property
    def packed_shardings(self) -> TrainState:
        """Of `packed`."""
        return jax.tree.map(lambda x: x.sharding, self.packed)

    def pack(self, state: TrainState) -> TrainState:
        """Lay a logical state out as the optimizer keeps it."""
        return pack_state(self.update, state)

    def unpack(self, packed: TrainState) -> TrainState:
        """Undo `pack`; shapes where the devices are not here."""
        if not self.can_run:
            return self.structs()
        return unpack_state(self.update, packed)

    def initial_state(
        self, init: Callable[[jax.Array], TrainState], seed: int
    ) -> TrainState:
        """Initialise what is kept; `packed` itself where the devices are not here."""
        if not self.can_run:
            return self.packed

        def packed(key: jax.Array) -> TrainState:
            return self.pack(init(key))

        return jax.jit(packed, out_shardings=self.packed_shardings)(
            jax.random.key(seed)
        )

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
