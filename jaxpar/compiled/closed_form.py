"""What should a step hold and communicate: the ZeRO table's closed forms, as a budget.

With Psi parameters, gathering all of them moves Psi elements of the compute dtype, and
reducing the gradients Psi elements of the reduction dtype. Each leaf's sharding says
how it is split: pipe and tensor shards are gathered and reduced over data separately.
Between replicas the shards of the gradients are all-reduced once a step. A reduction
that is not the plain one says itself what it communicates.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

import jax.numpy as jnp

from jaxpar.compiled.budget import REDUCTION, Budget, merged_reductions
from jaxpar.mesh import BATCH_AXES, DATA, EXPERT, PIPE, REPLICA, TENSOR
from jaxpar.sharding.collectives import wire_dtype
from jaxpar.sharding.leaf_sharding import LeafSharding
from jaxpar.sharding.zero import ZeroStage
from jaxpar.step.precision import Precision, frozen_dtype
from jaxpar.step.reduction import PLAIN, Reduction, Traffic, Wire

_AS_PERMUTES = 0.1
"""Of the bytes of reductions, what XLA:TPU may send as permutes (0.02 was seen)."""

COUPLED_TOLERANCE = 0.3
"""For a step whose collectives the compiler inserts: some are split, some repeated."""


@dataclasses.dataclass(frozen=True)
class ClosedForm:
    """How often and in which dtype parameters and gradients are communicated over data.

    Attributes:
      zero: the row of the ZeRO table.
      precision: the dtypes.
      accumulate: micro-batches a step.
      sizes: mesh axis -> devices on it.
      platform: of the devices.
      coupled: whether examples are coupled; the compiler then inserts the collectives
        over data.
    """

    zero: ZeroStage
    precision: Precision
    accumulate: int
    sizes: Mapping[str, int]
    platform: str
    coupled: bool

    @property
    def gathers(self) -> int:
        """How often every parameter is gathered in a step."""
        if self.zero.gather == "never":
            return 0
        at_use = self.zero.gather == "use" and not self._pipes
        return 2 * self.accumulate if at_use and not self.zero.keep else 1

    @property
    def reductions(self) -> int:
        """How often every gradient is reduced in a step."""
        if self._pipes:
            return 1
        each = self.zero.reduce == "microbatch" or self.coupled
        return self.accumulate if each else 1

    def gather_bytes(self, frozen: jnp.dtype | None = None) -> int:
        """Bytes of an element while a parameter is gathered.

        Args:
          frozen: the dtype of a parameter that is not trained; None for a trained one.
        """
        dtype = self.precision.compute_dtype
        own = dtype if frozen is None else frozen_dtype(frozen, dtype)
        # XLA:CPU gathers bf16 as fp32, and integers as they are.
        is_float = jnp.issubdtype(own, jnp.floating)
        return self._wire_bytes(own) if is_float else own.itemsize

    def bytes_gathered(
        self, elements: int, ways: int, frozen: jnp.dtype | None = None
    ) -> int:
        """Bytes of so many elements that are gathered, from shards.

        Args:
          elements: of all shards.
          ways: shards.
          frozen: as for `gather_bytes`.
        """
        codes, each = self.zero.weights, self.gather_bytes(frozen)
        if codes is None or not jnp.issubdtype(frozen or jnp.float32, jnp.floating):
            return each * elements
        return ways * codes.num_bytes(elements // ways)

    @property
    def reduce_bytes(self) -> int:
        """Bytes of an element while gradients are reduced."""
        own = self.precision
        # With data automatic, the compiler reduces gradients as they are computed.
        return self._wire_bytes(own.compute_dtype if self.coupled else own.reduce_dtype)

    def wire(self, times: int) -> Wire:
        """What a reduction's closed form depends on, for so many reductions a step."""
        return Wire(self.sizes, self.reduce_bytes, times)

    @property
    def adds_up(self) -> bool:
        """Whether gradients of several micro-batches are summed, in fp32."""
        return self._pipes or self.accumulate > 1

    @property
    def _pipes(self) -> bool:
        """Whether the step is pipelined: one gather and one reduction per step."""
        return self.sizes[PIPE] > 1

    def _wire_bytes(self, dtype: jnp.dtype) -> int:
        return wire_dtype(dtype, self.platform).itemsize


def closed_form_budget(
    leaf_shardings: Sequence[LeafSharding],
    closed_form: ClosedForm,
    state_bytes: int,
    host_state_bytes: int = 0,
    frozen: Sequence[tuple[LeafSharding, jnp.dtype]] = (),
    reduction: Reduction = PLAIN,
    shares: Mapping[str, float] = MappingProxyType({}),
) -> Budget:
    """Compute a step's budget in closed form.

    Traffic over tensor and pipe depends on the model, so those axes are unbounded; so
    is data where the compiler inserts the collectives of a pipeline.

    Args:
      leaf_shardings: the trained parameters' shardings, as they are communicated over
        data.
      closed_form: how often and in which dtype they are communicated.
      state_bytes: bytes of the state in a device's memory, from its shardings.
      host_state_bytes: likewise, in the host's.
      frozen: the other parameters' shardings and dtypes; they are gathered only.
      reduction: how gradients are reduced.
      shares: name of a trained parameter -> the share of its gradient that a step
        has, on average; 0 where the loss has none of it.

    Returns:
      The budget. Its floor is one reduction a step of every gradient; there is none
      where the compiler inserts the collectives. Reduce-scatters and all-reduces are
      counted separately on GPUs only: XLA:TPU turns some reduce-scatters into
      all-reduces, XLA:CPU many. With coupled
      examples the largest leaf may be reduced once more, as a table is that both embeds
      tokens and computes logits.
    """
    sizes = closed_form.sizes
    batch = [axis for axis in BATCH_AXES if axis in sizes]
    by_compiler = closed_form.coupled and (sizes[PIPE] > 1 or batch != [DATA])
    # The exchange of tokens between experts depends on the model, as tensor's traffic.
    models = (axis for axis in (EXPERT, PIPE, TENSOR) if axis in sizes)
    unbounded = tuple(dict.fromkeys((*(batch if by_compiler else ()), *models)))
    whole = 4 * sum(math.prod(leaf.shape) for leaf in leaf_shardings)
    return Budget(
        state_bytes=state_bytes,
        host_state_bytes=host_state_bytes,
        communicated=_communicated(leaf_shardings, frozen, closed_form, reduction),
        at_least=_at_least(leaf_shardings, closed_form, reduction, shares),
        tolerance=COUPLED_TOLERANCE if closed_form.coupled else Budget.tolerance,
        small_bytes=max(Budget.small_bytes, whole // 1000),
        unbounded=unbounded,
    )


def step_bytes(
    leaf_shardings: Iterable[LeafSharding],
    closed_form: ClosedForm,
    frozen: Iterable[tuple[LeafSharding, jnp.dtype]] = (),
) -> tuple[int, int]:
    """Compute in closed form what a step holds besides the state.

    Args:
      leaf_shardings: the trained parameters' shardings.
      closed_form: how often and in which dtype they are communicated over data.
      frozen: the other parameters' shardings and dtypes.

    Returns:
      Bytes on one device of parameters in the compute dtype, and of gradients. Copies
      that are cast at use are not included. Gradients of a single micro-batch have the
      dtype in which they are computed or reduced.
    """
    zero, itemsize = closed_form.zero, closed_form.precision.compute_dtype.itemsize
    at_use = zero.gather == "use" and not (zero.keep or closed_form._pipes)
    as_stored = zero.gather == "never" and itemsize == 4
    split = zero.reduce == "microbatch" and not closed_form._pipes
    single = closed_form.reduce_bytes if split else itemsize
    copies = gradients = 0
    for leaf in leaf_shardings:
        own = math.prod(leaf.shape) // leaf.ways_computed
        stored = math.prod(leaf.shape) // leaf.ways_stored
        copies += 0 if at_use or as_stored else own * itemsize
        gradients += (stored if split else own) * (4 if closed_form.adds_up else single)
    if not at_use:
        copies += sum(_copied(*each, closed_form) for each in frozen)
    return copies, gradients


def _copied(leaf: LeafSharding, dtype: jnp.dtype, closed_form: ClosedForm) -> int:
    """Bytes of a frozen leaf's copy that is gathered or cast once a step."""
    cast = frozen_dtype(dtype, closed_form.precision.compute_dtype)
    if cast == dtype and leaf.ways_computed == leaf.ways_stored:
        return 0
    return math.prod(leaf.shape) // leaf.ways_computed * cast.itemsize


def _communicated(
    leaf_shardings: Sequence[LeafSharding],
    frozen: Sequence[tuple[LeafSharding, jnp.dtype]],
    closed_form: ClosedForm,
    reduction: Reduction,
) -> Traffic:
    """Axes -> kind of collective -> bytes of the unsharded arrays, in a step."""
    reduced = _of_compiler if closed_form.coupled else reduction.communicated
    wire = closed_form.wire(closed_form.reductions)
    sent = reduced(leaf_shardings, wire).items()
    found = {axes: dict(own) for axes, own in sent if axes}
    if closed_form.platform != "gpu":
        found = {axes: merged_reductions(own) for axes, own in found.items()}
    if closed_form.platform == "tpu":
        for own in found.values():
            own["collective-permute"] = round(_AS_PERMUTES * own.get(REDUCTION, 0))
    of_trained = [(leaf, None) for leaf in leaf_shardings]
    for leaf, dtype in (*of_trained, *frozen):
        axes = wire.over(leaf.reduced_inside)
        ways, piece = leaf.data_ways, _piece(leaf)
        gathered = closed_form.gathers * closed_form.bytes_gathered(piece, ways, dtype)
        sent = [(axes, gathered)]
        if leaf.over_replicas:
            shard, ways = piece // ways, closed_form.sizes[REPLICA]
            once = closed_form.bytes_gathered(shard, ways, dtype)
            sent.append((wire.over((REPLICA,)), once))
        for axes, each in sent:
            if axes and leaf.is_split and each:
                kinds = found.setdefault(axes, {})
                kinds["all-gather"] = kinds.get("all-gather", 0) + each
    return found


def _at_least(
    leaf_shardings: Sequence[LeafSharding],
    closed_form: ClosedForm,
    reduction: Reduction,
    shares: Mapping[str, float],
) -> Traffic:
    """What reduces every gradient once a step; the compiler may join micro-batches."""
    if closed_form.coupled:
        return {}
    found: dict[str, dict[str, int]] = {}
    for share in {1.0, *shares.values()}:
        moved = [x for x in leaf_shardings if shares.get(x.name, 1.0) == share]
        sent = reduction.communicated(moved, closed_form.wire(1)).items()
        for axes, own in ((axes, own) for axes, own in sent if axes):
            kinds = found.setdefault(axes, {})
            for kind, each in merged_reductions(own).items():
                kinds[kind] = kinds.get(kind, 0) + round(share * each)
    return found


def _of_compiler(leaf_shardings: Sequence[LeafSharding], wire: Wire) -> Traffic:
    """What the compiler reduces: gradients where they are computed, the largest twice.

    Shards between replicas are named once more: what one of both has to spare.
    """
    found = PLAIN.communicated(leaf_shardings, dataclasses.replace(wire, times=0))
    each, inside = wire.times * wire.itemsize, {}
    for leaf in leaf_shardings:
        inside.setdefault(wire.over(leaf.reduced_inside), []).append(leaf)
    for axes, own in inside.items():
        made = list(map(_computed, own))
        if axes:
            kinds = found.setdefault(axes, {})
            kinds[REDUCTION] = each * (sum(made) + max(made))
    return found


def _computed(leaf: LeafSharding) -> int:
    """Elements of a leaf that one tensor index computes with."""
    return math.prod(leaf.shape) // leaf.ways_computed


def _piece(leaf: LeafSharding) -> int:
    """Elements of a leaf that one pipe and tensor index stores."""
    return math.prod(leaf.shape) // leaf.ways_placed
