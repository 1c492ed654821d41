"""How does a step update parameters, and in which form is the state stored?

The *logical* state has one leaf a parameter; users see it and checkpoints hold it. The
*packed* state is the one that steps carry, possibly in another form: an `Update`
converts between the two and updates the packed one. Its methods but `apply` have
defaults, for an update whose packed state is the logical one.

A new optimizer is an object with ``init`` and ``make_update`` (`MakesUpdate`).
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

import jax
from jax.sharding import Mesh

from jaxpar.sharding.leaf_sharding import LeafSharding
from jaxpar.step.layer_store import LayerStore
from jaxpar.step.reduction import PLAIN, Reduction
from jaxpar.types import Metrics, Params, PyTree


@runtime_checkable
class Update(Protocol):
    """An optimizer on a mesh.

    Its functions are traced and run on global arrays: the compiler divides them as the
    arrays are sharded.

    Attributes:
      reduction: how the gradients that it gets are reduced over data. With a
        `jaxpar.step.reduction.LocalGradients` it gets those of every data shard, and
        exchanges them itself.
      fetched: names of the parameters that are not on the devices, from which loops
        fetch each layer that they gather (of those in `UpdateSpec.by_layer`).
    """

    reduction: Reduction = PLAIN
    fetched: frozenset[str] = frozenset()

    def pack(self, params: PyTree, opt_state: PyTree) -> tuple[PyTree, PyTree]:
        """Convert the logical parameters and optimizer state to the packed form."""
        return params, opt_state

    def unpack(self, params: PyTree, opt_state: PyTree) -> tuple[PyTree, PyTree]:
        """Undo `pack`; an optimizer state of () stays (), for the parameters alone."""
        return params, opt_state

    def logical_shardings(
        self, params: PyTree, opt_state: PyTree
    ) -> tuple[PyTree, PyTree]:
        """The logical state's shardings, from those by the rules.

        An update whose state the devices have no room for gives leaves another memory
        kind here (``with_memory_kind("pinned_host")``): they are initialised, restored
        and handed out there, and `apply` copies them to the device and back.
        """
        return params, opt_state

    def shardings(self, params: PyTree, opt_state: PyTree) -> tuple[PyTree, PyTree]:
        """The packed state's shardings, from those of the logical state."""
        return params, opt_state

    def compute_params(self, params: PyTree) -> Params:
        """The parameters, or copies in the compute dtype, from the packed ones."""
        return params

    def at_new_params(self, opt_state: PyTree) -> PyTree:
        """The logical optimizer state where others take the parameters' place.

        Not traced: arrays of it may be replaced, sharded as they were.
        """
        return opt_state

    def local_params(self, params: PyTree) -> Params:
        """The parameters that a step's gradients are of, from the packed ones.

        Those of `compute_params`, except where `reduction` has devices `apart`.
        """
        return self.compute_params(params)

    def layer_stores(self) -> Mapping[int, LayerStore]:
        """By number of a parameter that is in no array, from where loops fetch it.

        `compute_params` then returns the numbers of its layers, int32, and its gradient
        is the sum of squares of each layer's.
        """
        return {}

    def pack_grads(self, grads: Params) -> PyTree:
        """Convert gradients to the form that `apply` takes; the norm is unchanged."""
        return grads

    def norm(self, grads: PyTree) -> jax.Array:
        """The global norm of gradients from `pack_grads`, as `reduction` defines it."""
        return self.reduction.norm(grads)

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
          grads: from `pack_grads`, of any floating dtype; reduced as `reduction` does.
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
        del leaf_shardings
        return self

    def notes(self) -> tuple[str, ...]:
        """Notes on how the state is stored, a line each."""
        return ()


@dataclasses.dataclass(frozen=True)
class HostTraffic:
    """What a `HostUpdate` does for one device, in bytes.

    Attributes:
      memory: that the host's cores read and write in its memory, in a step.
      disk: that are read from disk and written to it, in a step.
      on_disk: that it takes there, with all versions.
    """

    memory: int = 0
    disk: int = 0
    on_disk: int = 0


NO_TRAFFIC = HostTraffic()


@runtime_checkable
class HostUpdate(Update, Protocol):
    """An update that works on the host between two jitted functions.

    The first one computes gradients and packs them; then `on_host` is called with
    arrays; the second one takes the step (`apply`) with what it returned.

    Attributes:
      grads_leave_early: whether each gradient goes to the host as soon as it is
        reduced, layer by layer. `norm` is then given those that are there, and
        `pack_grads` must leave them where they are.
      delay_after: the step from which on each gradient is applied one step late, while
        the devices compute the next one; None for never.
    """

    grads_leave_early: bool = False
    delay_after: int | None = None

    def traffic(self) -> HostTraffic:
        """What it does for a device, for plans."""
        return NO_TRAFFIC

    def grads_shardings(self, params: PyTree) -> PyTree:
        """The packed gradients' shardings, from those of the logical parameters.

        Those with the memory kind ``pinned_host`` are copied to the host by the first
        function.
        """
        return params

    def on_host(
        self,
        grads: PyTree,
        params: PyTree,
        opt_state: PyTree,
        *,
        factor: jax.Array,
        applied: jax.Array,
        loss: jax.Array,
    ) -> tuple[PyTree, PyTree, PyTree]:
        """Work on the host; each process has its own shards of the arrays.

        Args:
          grads: packed; they may be computed still, so reading them waits.
          params: packed; of the step before. Leaves that are not returned are deleted.
          opt_state: packed; likewise.
          factor: as for `apply`.
          applied: as for `apply`: if it is false, the state must not change.
          loss: as for `apply`.

        Returns:
          What `apply` gets in place of the gradients, the parameters and the
          optimizer's state; of the shapes, dtypes and shardings that it was given.
        """
        ...

    def begin(
        self, grads: PyTree, params: PyTree, opt_state: PyTree, **known: jax.Array
    ) -> Callable[[], tuple[PyTree, PyTree, PyTree]]:
        """What needs the devices of `on_host`, which are idle now; and a function of
        the rest, which is called once they are at work again.

        For updates that are a step late; arguments and the function's results are
        those of `on_host`.
        """
        return functools.partial(self.on_host, grads, params, opt_state, **known)

    def finish_step(self, state: Any) -> None:
        """Called with the packed `TrainState`, before each `on_host` and after a step.

        For an update whose state outlives the process.
        """


@runtime_checkable
class StoresApart(HostUpdate, Protocol):
    """A `HostUpdate` that stores a part of the logical state outside of the packed one.

    Such as on disk: compiled functions have no arrays of it. `pack` stores what it is
    given there, unless it is traced, and `unpack` makes arrays of what is there.
    """

    def puts(self, params: PyTree, opt_state: PyTree) -> tuple[PyTree, PyTree]:
        """Functions that store one leaf each of a state that is made leaf by leaf.

        Args:
          params: the logical parameters, or anything by their names.
          opt_state: likewise.

        Returns:
          Functions of the leaf that return what `pack` gets in its place.
        """
        ...

    def whole_step(self) -> int | None:
        """The last step that was finished, by any process; None if there is none."""
        ...

    def recovered(self, structs: Any) -> Any:
        """The logical state that was stored when that step was finished.

        Args:
          structs: its shapes, dtypes and shardings, a `TrainState`.

        Raises:
          ValueError: if what is there is of another run.
        """
        ...


@dataclasses.dataclass(frozen=True)
class UpdateSpec:
    """What is known of a run before its optimizer makes an `Update`.

    Attributes:
      leaf_shardings: the parameters' shardings, in flattening order.
      mesh: the mesh.
      params: shapes of the parameters; fp32.
      opt_state: shapes of the logical state that the optimizer's ``init`` returns.
      compute_dtype: of the parameters that the loss function sees.
      by_layer: names of the parameters that every loss reads in loops over layers
        alone, a layer at a time.
      clip_norm: the largest norm of gradients, for a reduction that clips itself.
    """

    leaf_shardings: tuple[LeafSharding, ...]
    mesh: Mesh
    params: Params
    opt_state: PyTree
    compute_dtype: Any
    by_layer: frozenset[str] = frozenset()
    clip_norm: float | None = None


@runtime_checkable
class MakesUpdate(Protocol):
    """An optimizer that makes its own `Update`: how a new one is written."""

    def init(self, params: Params) -> PyTree:
        """Make the logical state for the initial parameters, fp32; traceable."""
        ...

    def make_update(self, spec: UpdateSpec) -> Update:
        """Make the update that a run's steps carry out."""
        ...
