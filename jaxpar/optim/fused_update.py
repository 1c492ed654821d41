"""How does a fused optimizer pack its state into buckets and update them?"""

import dataclasses
import functools
import math
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

from jaxpar.optim.buckets import Bucket, Buckets
from jaxpar.sharding.leaf_sharding import LeafSharding
from jaxpar.step.reduction import PLAIN, Reduction
from jaxpar.step.update import Update, UpdateSpec
from jaxpar.types import Metrics, Params, PyTree
from kernels_pallas.fused_optimizers import (
    Leaves,
    Numbers,
    Quantized,
    Rule,
    dequantize,
    fused_update,
    quantize,
)

Schedule = Callable[[Any], Any]

_WITH_MOMENTS = (optax.ScaleByAdamState, optax.ScaleByLionState)


@dataclasses.dataclass(frozen=True)
class FusedOptimizer:
    """An optimizer for buckets; made by `fused_adamw`, `fused_lamb` or `fused_lion`.

    `jaxpar.initialize` updates its buckets. Inside another transformation (chain,
    masked, MultiSteps) it runs the equal optax transformation and warns; with 8 bits it
    raises.

    Attributes:
      rule: the update of an element.
      learning_rate: a number, or a schedule of the steps taken.
      weight_decay: a number.
      mask: which leaves decay, as in optax; None for all.
      bits: bits of each element of a moment, 32 or 8.
      equal: the equal optax transformation.
    """

    rule: Rule
    learning_rate: float | Schedule
    weight_decay: float
    mask: Any
    bits: int
    equal: optax.GradientTransformation

    def init(self, params: Params) -> PyTree:
        """The optax transformation's init, for the logical state."""
        return self.equal.init(params)

    def update(self, *args: Any, **options: Any) -> Any:
        """The optax update, leaf by leaf; `jaxpar.initialize` does not call it.

        Raises:
          ValueError: if moments have 8 bits.

        Warns:
          UserWarning: always, because the update is not fused.
        """
        message = (
            "a fused optimizer inside another transformation updates leaf by leaf, "
            "with moments in fp32"
        )
        remedy = (
            "pass it directly to jaxpar.initialize, which clips (clip_norm) and "
            "accumulates (accumulate), or use the optax optimizer"
        )
        if self.bits == 8:
            raise ValueError(f"bits=8: {message}; {remedy}.")
        warnings.warn(f"{message}; {remedy}.", UserWarning, stacklevel=2)
        return self.equal.update(*args, **options)

    def make_update(self, spec: UpdateSpec) -> "FusedUpdate":
        """See `MakesUpdate`."""
        buckets = Buckets(spec.leaf_shardings, spec.mesh)
        return FusedUpdate(self, buckets, spec.params, spec.compute_dtype)


@dataclasses.dataclass(frozen=True, eq=False)
class FusedUpdate(Update):
    """A fused optimizer on a mesh; see `jaxpar.step.update.Update`.

    Packed parameters are ``{"masters": buckets, "copies": buckets}``, the copies only
    if the compute dtype is not fp32. The packed optimizer state is the logical one
    with buckets in place of each moment's tree.

    Attributes:
      optimizer: the optimizer.
      buckets: the parameters' buckets.
      like: the parameters' shapes.
      compute_dtype: the copies' dtype.
      reduction: how the gradients that it gets are reduced.
    """

    optimizer: FusedOptimizer
    buckets: Buckets
    like: Params
    compute_dtype: Any
    reduction: Reduction = PLAIN

    @property
    def _has_copies(self) -> bool:
        return self.compute_dtype != jnp.float32

    @property
    def _has_codes(self) -> bool:
        return self.optimizer.bits == 8

    def pack(self, params: PyTree, opt_state: PyTree) -> tuple[PyTree, PyTree]:
        """See `Update`."""
        return self._keep(params, opt_state)

    @functools.cached_property
    def _keep(self) -> Any:
        return jax.jit(self._kept)

    def _kept(self, params: PyTree, opt_state: PyTree) -> tuple[PyTree, PyTree]:
        kept = {"masters": self.pack_grads(params)}
        if self._has_copies:
            kept["copies"] = jax.tree.map(
                lambda x: x.astype(self.compute_dtype), kept["masters"]
            )
        return kept, self._with_moments(opt_state, self._pack_moment)

    def unpack(self, params: PyTree, opt_state: PyTree) -> tuple[PyTree, PyTree]:
        """See `Update`."""
        return self._logical(params, opt_state)

    @functools.cached_property
    def _logical(self) -> Any:
        return jax.jit(self._unpacked)

    def _unpacked(self, params: PyTree, opt_state: PyTree) -> tuple[PyTree, PyTree]:
        leaves = self._tree(self.buckets.unpack(params["masters"]))
        return leaves, self._with_moments(opt_state, self._unpack_moment)

    def shardings(self, params: PyTree, opt_state: PyTree) -> tuple[PyTree, PyTree]:
        """See `Update`."""
        names = self.buckets.by_name.items()
        flat = {name: self.buckets.sharding(bucket) for name, bucket in names}
        kept = {"masters": flat, **({"copies": flat} if self._has_copies else {})}
        moment: dict[str, Any] = flat
        if self._has_codes:
            moment = {name: Quantized(place, place) for name, place in flat.items()}
        del params
        return kept, self._with_moments(opt_state, lambda _, __: moment)

    def compute_params(self, params: PyTree) -> Params:
        """See `Update`."""
        kept = params["copies" if self._has_copies else "masters"]
        return self._tree(self.buckets.unpack(kept))

    def pack_grads(self, grads: Params) -> PyTree:
        """See `Update`."""
        return self.buckets.pack(jax.tree.leaves(grads))

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
        """See `Update`; reports the learning rate."""
        del loss
        state, rate = _found(opt_state, _WITH_MOMENTS), self._rate(opt_state)
        moments = {name: getattr(state, name) for name in self.optimizer.rule.moments}
        numbers = (rate, optax.safe_increment(state.count), factor, applied)
        specs = self.buckets.specs()
        by_kind = dict.fromkeys(params, specs), dict.fromkeys(moments, specs)
        step = self.buckets.mapped(self._step, (*by_kind, specs, P()), by_kind)
        params, moments = step(params, moments, grads, numbers)
        new = self._with_moments(opt_state, lambda name, _: moments[name])
        return params, _counted(new, applied), {"learning_rate": rate}

    def _step(
        self, params: PyTree, moments: PyTree, grads: PyTree, numbers: tuple
    ) -> tuple[PyTree, PyTree]:
        """Update a device's shard of every bucket."""
        stepped = {}
        for name, bucket in self.buckets.by_name.items():
            stepped[name] = fused_update(
                self.optimizer.rule,
                params["masters"][name],
                grads[name],
                {moment: moments[moment][name] for moment in moments},
                Numbers(*numbers),
                decays=self._decays(bucket),
                copies=params["copies"][name] if self._has_copies else None,
                leaves=Leaves(bucket.leaf_of_tiles, len(bucket.members), bucket.axes),
            )
        kept = {"masters": {name: new.params for name, new in stepped.items()}}
        if self._has_copies:
            kept["copies"] = {name: new.copies for name, new in stepped.items()}
        return kept, {
            moment: {name: new.moments[moment] for name, new in stepped.items()}
            for moment in moments
        }

    def _decays(self, bucket: Bucket) -> np.ndarray:
        """The weight decay of each of a bucket's tiles; fp32."""
        mask = self.optimizer.mask
        mask = mask(self.like) if callable(mask) else mask
        decaying = jax.tree.leaves(
            jax.tree.broadcast(True if mask is None else mask, self.like)
        )
        by_leaf = np.array([decaying[number] for number in bucket.members])
        return np.float32(self.optimizer.weight_decay) * by_leaf[bucket.leaf_of_tiles]

    def _rate(self, opt_state: PyTree) -> jax.Array:
        """The learning rate of the step."""
        rate = self.optimizer.learning_rate
        if callable(rate):
            rate = rate(_found(opt_state, optax.ScaleByScheduleState).count)
        return jnp.asarray(rate, jnp.float32)

    def _tree(self, leaves: list[jax.Array]) -> Params:
        return jax.tree.unflatten(jax.tree.structure(self.like), leaves)

    def _pack_moment(self, name: str, moment: Params) -> dict[str, Any]:
        then = functools.partial(quantize, name) if self._has_codes else None
        return self.buckets.pack(jax.tree.leaves(moment), then)

    def _unpack_moment(self, name: str, moment: dict[str, Any]) -> Params:
        first = functools.partial(dequantize, name) if self._has_codes else None
        return self._tree(self.buckets.unpack(moment, first))

    def _with_moments(
        self, opt_state: PyTree, change: Callable[[str, Any], Any]
    ) -> PyTree:
        """The optimizer's state, each moment replaced by `change`."""

        def changed(state: Any) -> Any:
            if not isinstance(state, _WITH_MOMENTS):
                return state
            names = self.optimizer.rule.moments
            return state._replace(**{n: change(n, getattr(state, n)) for n in names})

        return jax.tree.map(changed, opt_state, is_leaf=_is(_WITH_MOMENTS))

    def with_shardings(self, leaf_shardings: tuple[LeafSharding, ...]) -> "FusedUpdate":
        """See `Update`."""
        buckets = Buckets(leaf_shardings, self.buckets.mesh)
        return dataclasses.replace(self, buckets=buckets)

    def notes(self) -> tuple[str, ...]:
        """See `Update`."""
        buckets, num = self.buckets.by_name, len(self.buckets.leaf_shardings)
        pieces = [shape for bucket in buckets.values() for shape in bucket.shapes]
        arrays = 1 + len(self.optimizer.rule.moments)
        more = 4 * arrays * sum(map(math.prod, pieces)) / 1e9
        return (
            f"optimizer: {num} leaves are in buckets ({', '.join(buckets)}), of which "
            f"{self.buckets.filling:.1%} is padding.",
            f"optimizer: save and restore also hold the state leaf by leaf, "
            f"{more:.2g} GB more on a device.",
        )


def _is(kinds: Any) -> Callable[[Any], bool]:
    return lambda state: isinstance(state, kinds)


def _found(opt_state: PyTree, kind: Any) -> Any:
    """The first state of a kind in an optimizer's state."""
    states = jax.tree.leaves(opt_state, is_leaf=_is(kind))
    return next(state for state in states if isinstance(state, kind))


def _counted(opt_state: PyTree, applied: jax.Array) -> PyTree:
    """Increment each step count if the step is applied."""
    kinds = (*_WITH_MOMENTS, optax.ScaleByScheduleState)

    def counted(state: Any) -> Any:
        if not isinstance(state, kinds):
            return state
        more = optax.safe_increment(state.count)
        return state._replace(count=jnp.where(applied, more, state.count))

    return jax.tree.map(counted, opt_state, is_leaf=_is(kinds))
