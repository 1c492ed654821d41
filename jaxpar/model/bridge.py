"""How is a Flax model converted to pure functions of plain dicts?

The engine needs three functions of a model: initialise it, name the dims of its
parameters, and run a loss function on it. A `Network` has them, for NNX and Linen
alike; parameters and mutable state are nested dicts of arrays.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx, traverse_util
from jax.sharding import NamedSharding

from jaxpar.model.linen import LinenNetwork, axis_rules
from jaxpar.model.scopes import named_calls
from jaxpar.model.step_number import Step, filled
from jaxpar.sharding.constrain import placed_rules
from jaxpar.sharding.rules import AxisRules
from jaxpar.types import Batch, LossFn, Params, PyTree

_METADATA_KEYS = ("out_sharding", "sharding_names", "sharding")


@runtime_checkable
class Network(Protocol):
    """A model as pure functions.

    Attributes:
      axis_rules: Flax's ``logical_axis_rules``, which map dim names to mesh axes.
      former_names: (name of a parameter, its name in older checkpoints).
    """

    @property
    def axis_rules(self) -> AxisRules:
        """See above."""
        ...

    @property
    def former_names(self) -> Sequence[tuple[str, str]]:
        """See above."""
        ...

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
        step: Any = None,
    ) -> tuple[Any, PyTree]:
        """Call ``fn(model, batch)``; returns its result and the new model_state.

        `step` is the number that modules see (`jaxpar.model.step_number`); None for 0.
        """
        ...


@runtime_checkable
class Bridged(Protocol):
    """A model with its own `make_network`, such as one of several parts."""

    def make_network(self, loss_fn: LossFn, sample_batch: Batch) -> Network:
        """As the function of that name."""
        ...


@dataclasses.dataclass(frozen=True)
class UnderAxisRules:
    """A model that is converted in the context of Flax's ``logical_axis_rules``.

    Attributes:
      model: as `make_network` takes it.
      axis_rules: the rules.
    """

    model: Any
    axis_rules: AxisRules

    def make_network(self, loss_fn: LossFn, sample_batch: Batch) -> Network:
        """As the function of that name."""
        with nn.logical_axis_rules(self.axis_rules):
            return make_network(self.model, loss_fn, sample_batch)


def make_network(model: Any, loss_fn: LossFn, sample_batch: Batch) -> Network:
    """Convert a model to pure functions.

    Args:
      model: an NNX factory ``rngs -> nnx.Module``, a Linen module, or a
        `jaxpar.PipelineModel`.
      loss_fn: ``(model, batch) -> loss``; a Linen model is initialised by tracing it.
      sample_batch: shapes of a batch that `loss_fn` takes.

    Returns:
      The model as pure functions.

    Raises:
      TypeError: if `model` is none of these or an NNX module already made, or the
        factory returns something else.
    """
    if isinstance(model, Bridged):
        return model.make_network(loss_fn, sample_batch)
    if isinstance(model, nn.Module):
        return LinenNetwork(model, loss_fn, sample_batch)
    if isinstance(model, nnx.Module):
        raise TypeError(
            f"model={type(model).__name__}(...) is already made, on one device; "
            "pass a factory, model=lambda rngs: "
            f"{type(model).__name__}(..., rngs=rngs), so that it is made sharded."
        )
    if not callable(model):
        raise TypeError(
            f"model={model!r} must be an NNX factory (lambda rngs: MyModel(rngs=rngs)) "
            "or a Linen module."
        )
    return _NnxNetwork(model)


def pure_params(params: Params) -> Params:
    """Parameters as nested dicts of arrays; converts every ``nnx.State``."""
    if isinstance(params, nnx.State):
        return nnx.to_pure_dict(params)
    if isinstance(params, dict):  # By model.
        return {name: pure_params(own) for name, own in params.items()}
    return params


class _NnxNetwork:
    """NNX: leaves are split by type, and merged again inside the trace.

    A leaf is a variable's value or an array attribute of a module.
    """

    former_names: Sequence[tuple[str, str]] = ()

    def __init__(self, factory: Callable[..., Any]):
        self._factory = factory
        self.axis_rules = axis_rules()
        self._graphdef: Any = None

        def split(key: jax.Array) -> list:
            self._graphdef, *states = self._split(key)
            return states

        states = jax.eval_shape(split, jax.random.key(0))
        self._params, self._rngs, self._steps, self._state = (
            list(nnx.to_flat_state(state)) for state in states
        )

    def _split(self, key: jax.Array) -> tuple[Any, ...]:
        with nnx.use_eager_sharding(False):
            model = _call_factory(self._factory, nnx.Rngs(key))
            self.class_name = type(model).__name__
            _mark_arrays(model)
            return nnx.split(model, nnx.Param, nnx.RngState, Step, ...)

    def init(self, key: jax.Array) -> tuple[Params, PyTree]:
        _, params, _, _, state = self._split(key)
        return _to_dict(params), _to_dict(state)

    def dim_names(self) -> dict[str, Sequence[Any] | None]:
        return {
            "/".join(map(str, path)): _names_of(variable.get_metadata())
            for path, variable in self._params
        }

    def variable_types(self) -> dict[str, type]:
        return {"/".join(map(str, path)): type(leaf) for path, leaf in self._params}

    def run(
        self,
        fn: LossFn,
        variables: tuple[Params, PyTree],
        key: jax.Array,
        batch: Batch,
        *,
        training: bool,
        step: Any = None,
    ) -> tuple[Any, PyTree]:
        params, state = variables
        rules = placed_rules(self.axis_rules)
        with nnx.use_eager_sharding(False), nn.logical_axis_rules(rules):
            model = nnx.merge(
                self._graphdef,
                _from_dict(self._params, params),
                self._fresh_rngs(key),
                self._numbered(step),
                _from_dict(self._state, state),
            )
            if not training:
                model.eval()
            with named_calls(model):
                out = fn(model, batch)
        after = dict(nnx.to_flat_state(nnx.state(model)))
        kept = {path: _value(after[path]) for path, _ in self._state if path in after}
        return out, traverse_util.unflatten_dict(kept)

    def _numbered(self, step: Any) -> nnx.State:
        """The number of the step for every `Step`."""
        return nnx.from_flat_state(
            (path, variable.replace(filled(variable.get_value(), step)))
            for path, variable in self._steps
        )

    def _fresh_rngs(self, key: jax.Array) -> nnx.State:
        """A new key for every key variable; zero for every count."""
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


def _call_factory(factory: Callable[..., Any], rngs: nnx.Rngs) -> nnx.Module:
    """Make the model: ``factory(rngs=rngs)``, or by position if it has no `rngs`."""
    signature = _signature(factory)
    by_name, by_place = ((), {"rngs": rngs}), ((rngs,), {})
    for args, kwargs in (by_name, by_place)[: 2 - ("rngs" in signature.parameters)]:
        try:
            signature.bind(*args, **kwargs)
        except TypeError:
            continue
        break
    else:
        taken = [p.name for p in signature.parameters.values() if p.default is p.empty]
        raise TypeError(
            f"model: the factory takes {', '.join(taken) or 'no argument'}, but is "
            "called with one, rngs. Pass model=lambda rngs: MyModel(..., rngs=rngs)."
        )
    model = factory(*args, **kwargs)
    if not isinstance(model, nnx.Module):
        raise TypeError(
            f"model: the factory returned {type(model).__name__}, which is not an "
            "nnx.Module; return one, or pass the Linen module itself."
        )
    return model


def _signature(factory: Callable[..., Any]) -> inspect.Signature:
    """A factory's signature; for a class, that of ``__init__``, which NNX hides."""
    call = functools.partial(factory)
    if isinstance(call.func, type):
        call = functools.partial(call.func.__init__, None, *call.args, **call.keywords)
    return inspect.signature(call)


def _mark_arrays(model: nnx.Module) -> None:
    """Mark array attributes as data, and containers of arrays.

    Flax marks arrays and raises for containers of them, but does not recognise tracers
    (flax 0.12.12), which all arrays are here: it would treat them as static and leak
    them.
    """
    for _, module in nnx.iter_modules(model):
        for name, value in list(vars(module).items()):
            is_some = type(value) in (list, tuple, dict)
            leaves = jax.tree.leaves(value) if is_some else [value]
            if any(isinstance(leaf, jax.Array) for leaf in leaves):
                setattr(module, name, nnx.data(value))


def _names_of(metadata: Mapping[str, Any]) -> tuple | None:
    """The names of a variable's dims, by the rules that came with them, or None."""
    names = next((metadata[k] for k in _METADATA_KEYS if metadata.get(k)), ())
    if isinstance(names, NamedSharding):
        names = names.spec
    rules = dict(metadata.get("sharding_rules") or ())
    return tuple(rules.get(name, name) for name in names) or None


def _value(leaf: Any) -> Any:
    """A variable's value, or an array attribute, as arrays without weak types."""
    value = leaf.get_value() if isinstance(leaf, nnx.Variable) else leaf
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.result_type(x)), value)


def _to_dict(state: nnx.State) -> dict:
    values = {path: _value(leaf) for path, leaf in nnx.to_flat_state(state)}
    return traverse_util.unflatten_dict(values)


def _from_dict(leaves: Sequence[tuple[tuple, Any]], values: dict) -> nnx.State:
    filled = []
    for path, leaf in leaves:
        value = values
        for part in path:
            value = value[part]
        is_variable = isinstance(leaf, nnx.Variable)
        filled.append((path, leaf.replace(value) if is_variable else value))
    return nnx.from_flat_state(filled)
