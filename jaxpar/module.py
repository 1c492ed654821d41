"""How does a Flax model become pure functions of plain dicts: NNX and Linen alike?

The engine knows three things of a model: how to initialise it, what the dims of its
parameters are called, and how to run a loss function on it. A `Network` gives them;
parameters and mutable state are nested dicts of arrays on both sides.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx

from jaxpar import tree
from jaxpar.types import Batch, LossFn, Params, PyTree

_METADATA_KEYS = ("out_sharding", "sharding_names", "sharding")


@runtime_checkable
class Network(Protocol):
    """A model as pure functions."""

    def init(self, key: jax.Array) -> tuple[Params, PyTree]:
        """Make (params, model_state); traceable."""
        ...

    def dim_names(self) -> dict[str, Sequence[Any] | None]:
        """Leaf name -> the model's names of its dims, or None."""
        ...

    def run(
        self,
        fn: LossFn,
        variables: tuple[Params, PyTree],
        key: jax.Array,
        batch: Batch,
        *,
        training: bool,
    ) -> tuple[Any, PyTree]:
        """Call ``fn(model, batch)``; returns its result and the new model_state."""
        ...


@runtime_checkable
class Bridged(Protocol):
    """A model that is made of several, and bridges to them itself."""

    def make_network(self, loss_fn: LossFn, sample_batch: Batch) -> Network:
        """As the function of that name."""
        ...


def make_network(model: Any, loss_fn: LossFn, sample_batch: Batch) -> Network:
    """Bridge to a model.

    Args:
      model: an NNX factory ``rngs -> nnx.Module``, a Linen module, or a
        `jaxpar.PipelineModel`.
      loss_fn: ``(model, batch) -> loss``; a Linen model is initialised by tracing it.
      sample_batch: shapes of a batch that `loss_fn` takes.

    Returns:
      The model as pure functions.

    Raises:
      TypeError: if `model` is neither, or an NNX module already made, or the factory
        returns something else.
    """
    if isinstance(model, Bridged):
        return model.make_network(loss_fn, sample_batch)
    if isinstance(model, nn.Module):
        return _LinenNetwork(model, loss_fn, sample_batch)
    if isinstance(model, nnx.Module):
        raise TypeError(
            f"model={type(model).__name__}(...) is already made, whole on one device; "
            "pass a factory, model=lambda rngs: "
            f"{type(model).__name__}(..., rngs=rngs), so that it is made sharded."
        )
    if not callable(model):
        raise TypeError(
            f"model={model!r} must be an NNX factory (lambda rngs: MyModel(rngs=rngs)) "
            "or a Linen module."
        )
    return _NnxNetwork(model)


class _NnxNetwork:
    """NNX: variables are split by type, merged again inside the trace."""

    def __init__(self, factory: Callable[[nnx.Rngs], Any]):
        self._factory = factory
        with nnx.use_eager_sharding(False):
            model = nnx.eval_shape(lambda: self._make(jax.random.key(0)))
        self._graphdef, params, rngs, state = nnx.split(
            model, nnx.Param, nnx.RngState, ...
        )
        self._params, self._rngs, self._state = (
            list(nnx.to_flat_state(part)) for part in (params, rngs, state)
        )

    def _make(self, key: jax.Array) -> nnx.Module:
        model = self._factory(nnx.Rngs(key))
        if not isinstance(model, nnx.Module):
            raise TypeError(
                f"model: the factory returned {type(model).__name__}, which is not an "
                "nnx.Module; return one, or pass the Linen module itself."
            )
        return model

    def init(self, key: jax.Array) -> tuple[Params, PyTree]:
        with nnx.use_eager_sharding(False):
            _, params, _, state = nnx.split(
                self._make(key), nnx.Param, nnx.RngState, ...
            )
        return _to_dict(params), _to_dict(state)

    def dim_names(self) -> dict[str, Sequence[Any] | None]:
        return {
            "/".join(map(str, path)): tuple(
                next((meta[k] for k in _METADATA_KEYS if meta.get(k)), ())
            )
            or None
            for path, variable in self._params
            for meta in [variable.get_metadata()]
        }

    def run(
        self,
        fn: LossFn,
        variables: tuple[Params, PyTree],
        key: jax.Array,
        batch: Batch,
        *,
        training: bool,
    ) -> tuple[Any, PyTree]:
        params, state = variables
        with nnx.use_eager_sharding(False):
            model = nnx.merge(
                self._graphdef,
                _from_dict(self._params, params),
                self._fresh_rngs(key),
                _from_dict(self._state, state),
            )
            if not training:
                model.eval()
            out = fn(model, batch)
        after = dict(nnx.to_flat_state(nnx.state(model)))
        kept = {path: after[path].get_value() for path, _ in self._state}
        return out, _nested(kept)

    def _fresh_rngs(self, key: jax.Array) -> nnx.State:
        """Every key variable its own key; every count zero."""
        fresh = []
        for index, (path, variable) in enumerate(self._rngs):
            old = variable.get_value()
            if jnp.issubdtype(old.dtype, jax.dtypes.prng_key):
                own = jax.random.fold_in(key, index)
                value = jax.random.split(own, old.shape) if old.shape else own
            else:
                value = jnp.zeros(old.shape, old.dtype)
            fresh.append((path, variable.replace(value)))
        return nnx.from_flat_state(fresh)


def _nested(flat: Mapping[tuple, Any]) -> dict:
    nested: dict = {}
    for path, value in flat.items():
        inner = nested
        for part in path[:-1]:
            inner = inner.setdefault(part, {})
        inner[path[-1]] = value
    return nested


def _to_dict(state: nnx.State) -> dict:
    return _nested({p: v.get_value() for p, v in nnx.to_flat_state(state)})


def _from_dict(variables: Sequence[tuple[tuple, Any]], values: dict) -> nnx.State:
    filled = []
    for path, variable in variables:
        value = values
        for part in path:
            value = value[part]
        filled.append((path, variable.replace(value)))
    return nnx.from_flat_state(filled)


@dataclasses.dataclass(frozen=True)
class _LinenNetwork:
    """Linen: the loss function gets a `LinenModel` in the module's place."""

    module: nn.Module
    loss_fn: LossFn
    sample_batch: Batch

    def init(self, key: jax.Array) -> tuple[Params, PyTree]:
        variables = nn.meta.unbox(self._boxed(key))
        return variables.pop("params", {}), variables

    def _boxed(self, key: jax.Array) -> dict:
        batch = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), self.sample_batch)
        model = LinenModel(self.module, None, key, training=True)
        self.loss_fn(model, batch)
        if model.variables is None:
            raise TypeError(
                "loss_fn: it never called model(...), so a Linen model cannot be "
                "initialised by tracing it; call the model with the batch's inputs."
            )
        return dict(model.variables)

    def dim_names(self) -> dict[str, Sequence[Any] | None]:
        boxed = jax.eval_shape(self._boxed, jax.random.key(0))
        specs = nn.get_partition_spec(boxed).get("params", {})
        named = tree.named_leaves(specs, is_leaf=lambda x: isinstance(x, tuple))
        return {name: tuple(spec) or None for name, spec in named.items()}

    def run(
        self,
        fn: LossFn,
        variables: tuple[Params, PyTree],
        key: jax.Array,
        batch: Batch,
        *,
        training: bool,
    ) -> tuple[Any, PyTree]:
        params, state = variables
        model = LinenModel(
            self.module, {"params": params, **state}, key, training=training
        )
        out = fn(model, batch)
        after = dict(model.variables or {})
        return out, {name: after[name] for name in state}


class LinenModel:
    """A Linen module with its variables: what loss_fn is given as `model`.

    Calls go to ``module.apply``; collections that a training call changes are kept for
    the next call and the next step.

    Attributes:
      training: whether this is a training step (else an evaluation).
      variables: collections by name; None before the call that initialises them.
    """

    def __init__(
        self,
        module: nn.Module,
        variables: dict | None,
        key: jax.Array,
        *,
        training: bool,
    ):
        self.module, self._key = module, key
        self.variables, self.training = variables, training

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Apply the module; arguments (and ``method=``) are Linen's."""
        params_key, dropout_key, self._key = jax.random.split(self._key, 3)
        rngs = {"params": params_key, "dropout": dropout_key}
        if self.variables is None:
            out, made = self.module.init_with_output(rngs, *args, **kwargs)
            self.variables = {k: v for k, v in made.items() if k != "intermediates"}
            return out
        mutable = [name for name in self.variables if name != "params"]
        out, changed = self.module.apply(
            self.variables,
            *args,
            rngs=rngs,
            mutable=mutable if self.training else [],
            **kwargs,
        )
        self.variables = {**self.variables, **changed}
        return out
