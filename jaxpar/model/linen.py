"""How is a Linen module converted to pure functions of plain dicts?

The loss function gets a `LinenModel` instead of the module. It is called like
``module.apply``, without the variables. State collections (batch statistics) carry over
from call to call and from step to step. Sown values (intermediate values, expert
losses) are not state: a call with ``mutable=`` returns them, and they are dropped.
"""

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import errors, traverse_util
from flax.core import DenyList
from flax.core.scope import in_filter, union_filters
from flax.linen import spmd
from jax.sharding import AbstractMesh, AxisType, get_abstract_mesh, use_abstract_mesh

from jaxpar import tree
from jaxpar.mesh import AXES, BATCH_AXES
from jaxpar.model.step_number import CONTEXT, filled, is_context
from jaxpar.sharding.constrain import placed_rules
from jaxpar.sharding.rules import AxisRules, flat_names
from jaxpar.types import Batch, LossFn, Params, PyTree


class NotCalledError(TypeError):
    """A loss function never called the model that tracing it should initialise."""


Filter = bool | str | Collection[str] | DenyList
"""A selection of collections, as Linen's ``mutable=`` takes it."""

_ONE_DEVICE = AbstractMesh(
    (1,) * len(AXES), AXES, axis_types=(AxisType.Auto,) * len(AXES)
)
_NO_MESH = AbstractMesh((), ())


class LinenNetwork:
    """A Linen module as a `jaxpar.model.bridge.Network`.

    Args:
      module: the module.
      loss_fn: ``(model, batch) -> loss``; tracing it initialises the module.
      sample_batch: shapes of a batch that `loss_fn` takes.

    Attributes:
      axis_rules: the ``logical_axis_rules`` in context when it is made.
      former_names: none.
      class_name: of the module.
    """

    former_names: Sequence[tuple[str, str]] = ()

    def __init__(self, module: nn.Module, loss_fn: LossFn, sample_batch: Batch):
        self._module, self._loss_fn = module, loss_fn
        self._sample_batch, self.class_name = sample_batch, type(module).__name__
        self.axis_rules = axis_rules()

    def init(self, key: jax.Array) -> tuple[Params, PyTree]:
        """Make (params, model_state); traceable."""
        variables = _unboxed(self._initialized(key, kept=self._traced))
        if self._context(0):
            variables.pop(CONTEXT)
        return variables.pop("params", {}), variables

    def dim_names(self) -> dict[str, Sequence[Any] | None]:
        """Leaf name -> the model's names of its dims, or None."""
        named = tree.named_leaves(self._traced.get("params", {}), is_leaf=_is_box)
        return {name: _names_of(leaf) for name, leaf in named.items()}

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
        """Call ``fn(model, batch)``; returns its result and the new model_state."""
        mesh = get_abstract_mesh() if self._fits_mesh else _NO_MESH
        with use_abstract_mesh(mesh):
            return self._run(fn, variables, key, batch, training=training, step=step)

    def _run(
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
        given = {"params": params, **state, **self._context(step)}
        model = LinenModel(self._module, given, key, training=training)
        with nn.logical_axis_rules(placed_rules(self.axis_rules)):
            out = fn(model, batch)
        after = model.variables or {}
        return out, {name: after[name] for name in state}

    def _context(self, step: Any) -> dict:
        """The collection with the step's number, if the module has it."""
        own = _unboxed(self._traced).get(CONTEXT, {})
        if not is_context(own):
            return {}
        return {CONTEXT: jax.tree.map(lambda x: filled(x, step), own)}

    @functools.cached_property
    def _traced(self) -> dict:
        """The variables' shapes, with their metadata."""
        with use_abstract_mesh(_NO_MESH):
            return jax.eval_shape(lambda: self._initialized(jax.random.key(0)))

    @functools.cached_property
    def _fits_mesh(self) -> bool:
        """Whether the model can be called with a mesh in context.

        Flax uses dim names as axes of that mesh when a box is unboxed: DenseGeneral
        does so in every call, to check its kernel's shape.
        """
        boxes = jax.tree.leaves(self._traced, is_leaf=_is_box)
        names = [_names_of(box) for box in boxes if _is_box(box)]
        if not names:
            return True
        if not set(BATCH_AXES).isdisjoint(flat_names(names)):
            return False  # Usually they are manual, and constraints can't name them.
        variables = _unboxed(self._traced)
        if self._context(0):
            variables.pop(CONTEXT)
        given = (variables.pop("params", {}), variables)

        def state_of(variables: tuple, batch: Batch) -> PyTree:
            key = jax.random.key(0)
            return self._run(self._loss_fn, variables, key, batch, training=True)[1]

        try:
            with use_abstract_mesh(_NO_MESH), use_abstract_mesh(_ONE_DEVICE):
                jax.eval_shape(state_of, given, self._sample_batch)
        except ValueError:
            return False
        return True

    def _initialized(self, key: jax.Array, kept: Collection[str] | None = None) -> dict:
        batch = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), self._sample_batch)
        model = LinenModel(self._module, None, key, training=True, kept=kept)
        self._loss_fn(model, batch)
        if model.variables is None:
            raise NotCalledError(
                "loss_fn: it never called model(...), so a Linen model cannot be "
                "initialised by tracing it; call the model with the batch's inputs."
            )
        return dict(model.variables)


def _unboxed(variables: Mapping[str, Any]) -> dict:
    """Variables without their metadata, unboxed without a mesh in context."""
    with use_abstract_mesh(_NO_MESH):
        return nn.meta.unbox(dict(variables))


def _is_box(leaf: Any) -> bool:
    return isinstance(leaf, nn.meta.AxisMetadata)


def axis_rules() -> AxisRules:
    """Flax's ``logical_axis_rules`` in context."""
    return tuple((name, axes) for name, axes in nn.get_logical_axis_rules())


def _names_of(leaf: Any) -> tuple | None:
    """The names of a leaf's dims, by the rules that came with them, or None."""
    if isinstance(leaf, nn.LogicallyPartitioned) and leaf.rules:
        return tuple(spmd.logical_to_mesh_axes(leaf.names, leaf.rules) or ()) or None
    return tuple(nn.get_partition_spec(leaf)) or None


class LinenModel:
    """A Linen module with its variables: the `model` argument of loss_fn.

    Args:
      module: the module.
      variables: collections by name; None to initialise them at the first call.
      key: the key of its random numbers.
      training: True in a training step, False in an evaluation.
      kept: the initialised collections that are state; None for those without which
        the module can't be applied.

    Attributes:
      module: as given.
      training: as given.
      variables: collections by name; None before the call that initialises them.
    """

    def __init__(
        self,
        module: nn.Module,
        variables: dict | None,
        key: jax.Array,
        *,
        training: bool,
        kept: Collection[str] | None = None,
    ):
        self.module, self._key, self._kept = module, key, kept
        self.variables, self.training = variables, training
        self._initialises = variables is None

    def __call__(
        self,
        *args: Any,
        mutable: Filter = False,
        rngs: Mapping[str, jax.Array] | jax.Array | None = None,
        **kwargs: Any,
    ) -> Any:
        """Apply the module.

        Args:
          *args: the module's, like all other keywords; ``method=`` is Linen's.
          mutable: collections whose new values to return.
          rngs: keys by stream, or one for all, instead of the engine's.

        Returns:
          The module's result; with ``mutable=``, a pair of it and the collections, as
          from ``apply``.
        """
        params_key, dropout_key, self._key = jax.random.split(self._key, 3)
        streams = {"params": params_key, "dropout": dropout_key}
        if isinstance(rngs, Mapping):
            streams |= rngs
        elif rngs is not None:
            streams = {"params": rngs}

        def apply(variables: Mapping[str, Any], mutable: Filter) -> Any:
            return self.module.apply(
                variables, *args, rngs=streams, mutable=mutable, **kwargs
            )

        if self._initialises or self.variables is None:
            # Initial values depend on the run's seed alone.
            out, made = self.module.init_with_output(
                streams | {"params": params_key},
                *args,
                mutable=union_filters(DenyList("intermediates"), mutable),
                **kwargs,
            )
            new = self._variables_of(made, apply)
            self.variables = _joined(self.variables or {}, new)
            changed = _unboxed(made)
        else:
            own = [
                name
                for name, values in self.variables.items()
                if name != "params" and not (name == CONTEXT and is_context(values))
            ]
            own = own if self.training else []
            out, changed = apply(self.variables, union_filters(own, mutable))
            kept = {name: changed[name] for name in own}
            self.variables = {**self.variables, **kept}
        if mutable is False:
            return out
        return out, {k: v for k, v in changed.items() if in_filter(mutable, k)}

    def _variables_of(self, made: Mapping[str, Any], apply: Callable) -> dict:
        """The initialised parameters and state, without sown values."""
        names = self._kept
        if names is None:
            names = [name for name in made if _is_kept(name, made, apply)]
        return {name: values for name, values in made.items() if name in names}


def uninitialised(model: Any, key: jax.Array) -> LinenModel | None:
    """A Linen module that its first call initialises; None for another model."""
    if not isinstance(model, nn.Module):
        return None
    return LinenModel(model, None, key, training=True)


def _joined(before: Mapping[str, Any], new: Mapping[str, Any]) -> dict:
    """Add the variables that a later call initialises, such as a decoder's."""
    leaves = traverse_util.flatten_dict(new) | traverse_util.flatten_dict(before)
    return traverse_util.unflatten_dict(leaves)


def _is_kept(name: str, made: Mapping[str, Any], apply: Callable) -> bool:
    """Whether a module can't be applied without a collection that it initialised.

    It can be applied without sown collections: nothing is sown if they are immutable.
    """
    if name == "params":
        return True
    others = {own: values for own, values in made.items() if own != name}
    try:
        apply(others, [own for own in others if own != "params"])
    except (
        errors.ScopeCollectionNotFound,
        errors.ScopeVariableNotFoundError,
        errors.ModifyScopeVariableError,
    ):
        return True
    return False
