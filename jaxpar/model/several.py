"""How are several models one network: a dict of them is the loss function's model.

A generator and its discriminator, an actor and a critic, a policy and its reference:
every loss function is called with all of them and trains some.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from jaxpar import tree
from jaxpar.model.bridge import Network, UnderAxisRules, make_network
from jaxpar.model.linen import NotCalledError, uninitialised
from jaxpar.model.model_state import with_leaves
from jaxpar.model.trainable import Typed
from jaxpar.sharding.rules import AxisRules
from jaxpar.types import Batch, LossFn, Params, PyTree


class Models(dict[str, Any]):
    """The models by name, as a loss function of several gets them."""

    def __missing__(self, name: str) -> Any:
        raise KeyError(
            f"loss_fn: there is no model {name!r}; the models are "
            f"{', '.join(map(repr, self))}.{tree.near_match(name, self)} An average "
            "(jaxpar.Ema) can be called if its loss trains one model, and all of it."
        )


@dataclasses.dataclass(frozen=True)
class SeveralNetworks:
    """Several models as one: a `jaxpar.model.bridge.Network`.

    Parameters and mutable state are nested by the models' names.

    Attributes:
      networks: name -> the model.
      copies: name of a model -> that whose parameters and mutable state it begins
        with.
      averages: name of a moving average -> the model that it averages; it has
        parameters of its own, and that model's mutable state.
      in_training: models that some loss trains. They run in training mode in a training
        step; all others, and averages, run in evaluation mode.
      kept: models whose mutable state the loss changes; None for all.
    """

    networks: Mapping[str, Network]
    copies: Mapping[str, str]
    averages: Mapping[str, str] = dataclasses.field(default_factory=dict)
    in_training: frozenset[str] = frozenset()
    kept: frozenset[str] | None = None

    @property
    def axis_rules(self) -> AxisRules:
        """The models' rules, which are those in context when they were made."""
        return next(iter(self.networks.values())).axis_rules

    @property
    def former_names(self) -> Sequence[tuple[str, str]]:
        """The models', below their names."""
        return [
            (f"{name}/{now}", f"{name}/{before}")
            for name, network in self.networks.items()
            for now, before in network.former_names
        ]

    def init(self, key: jax.Array) -> tuple[Params, PyTree]:
        """Make the parameters and the state; each model has its own key."""
        params, state = {}, {}
        for index, (name, network) in enumerate(self.networks.items()):
            params[name], state[name] = network.init(jax.random.fold_in(key, index))
        for name, source in self.copies.items():
            params[name] = _copied(name, params[name], source, params[source])
            state[name] = _copied(name, state[name], source, state[source])
        for name, source in self.averages.items():
            params[name] = params[source]
        return params, with_leaves(state)

    def dim_names(self) -> dict[str, Sequence[Any] | None]:
        """The models' dim names, below their names."""
        named = {name: network.dim_names() for name, network in self._all().items()}
        return {
            f"{name}/{path}": dims
            for name, own in named.items()
            for path, dims in own.items()
        }

    def variable_types(self) -> dict[str, type]:
        """The types of the parameters of NNX models."""
        return {
            f"{name}/{path}": kind
            for name, network in self._all().items()
            if isinstance(network, Typed)
            for path, kind in network.variable_types().items()
        }

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
        """Call ``fn(models, batch)``; returns its result and the state of `kept`."""
        params, state = variables
        networks, after = self._all(), {}

        def within(names: Sequence[str], models: Models) -> Any:
            if not names:
                return fn(models, batch)
            name = names[0]

            def call(model: Any, _: Any) -> Any:
                return within(names[1:], Models({**models, name: model}))

            # A model without parameters is not among those that others are split from.
            own = params.get(name, {}), state.get(self.averages.get(name, name), {})
            given = own, jax.random.fold_in(key, len(names)), None
            mode = training and name in self.in_training
            how = {"training": mode, "step": step}
            out, after[name] = networks[name].run(call, *given, **how)
            return out

        out = within(list(networks), Models())
        kept = self.networks if self.kept is None else self.kept
        return out, {name: (after if name in kept else state)[name] for name in state}

    def _all(self) -> dict[str, Network]:
        averages = {name: self.networks[own] for name, own in self.averages.items()}
        return {**self.networks, **averages}


def _copied(name: str, own: PyTree, source: str, params: PyTree) -> PyTree:
    """A copy of another model's parameters or state, in the model's own dtypes."""
    found, wanted = tree.named_leaves(params), tree.named_leaves(own)
    other = [
        path
        for path in {**found, **wanted}
        if path not in found
        or path not in wanted
        or found[path].shape != wanted[path].shape
    ]
    if other:
        raise ValueError(
            f"init_from: {name!r} begins as a copy of {source!r}, but they differ in "
            f"{', '.join(other[:3])}; give both the same model."
        )
    return jax.tree.map(lambda x, to: x.astype(to.dtype), params, own)


class _NotMadeError(Exception):
    """A model is called that is not made yet."""


class _NotMade:
    """Replaces a model that can't be made before another one is."""

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise _NotMadeError

    def __getattr__(self, name: str) -> Any:
        raise _NotMadeError


def make_networks(
    models: Mapping[str, Any], losses: Sequence[LossFn], samples: Sequence[Batch]
) -> dict[str, Network]:
    """Convert several models to pure functions.

    Args:
      models: name -> a model as `jaxpar.model.bridge.make_network` takes it.
      losses: ``(models, batch) -> loss``. Tracing them initialises Linen models, and
        says what a `jaxpar.PipelineModel` is called with.
      samples: for each, shapes of a batch that it takes.

    Returns:
      Name -> network.

    Raises:
      ValueError: if models can only be made one after the other, each before all.
      TypeError: as `make_network`.
    """
    made: dict[str, Network] = {}
    while len(made) < len(models):
        for name in [name for name in models if name not in made]:
            fn = _calling(name, models, made, losses)
            try:
                network = make_network(models[name], fn, list(samples))
                jax.eval_shape(network.init, jax.random.key(0))
            except _NotMadeError:
                continue
            except NotCalledError as error:
                raise TypeError(f"model {name!r}: {error}") from None
            made[name] = network
            break
        else:
            names = ", ".join(repr(name) for name in models if name not in made)
            raise ValueError(
                f"model: {names} are PipelineModels that each need another's result "
                "before they are called; call one of them first in one of the losses."
            )
    return {name: made[name] for name in models}


def _calling(
    name: str,
    models: Mapping[str, Any],
    made: Mapping[str, Network],
    losses: Sequence[LossFn],
) -> Callable[[Any, Sequence[Batch]], Any]:
    """``(model, samples)``: calls all losses with one model, and the others' initial
    parameters."""

    def fn(called: Any, samples: Sequence[Batch]) -> None:
        def within(names: Sequence[str], given: Models) -> None:
            if not names:
                for loss, sample in zip(losses, samples, strict=True):
                    loss(given, sample)
                return
            other, key = names[0], jax.random.key(0)

            def call(found: Any, _: Any = None) -> None:
                within(names[1:], Models({**given, other: found}))

            model = models[other]
            own = model.model if isinstance(model, UnderAxisRules) else model
            linen = uninitialised(own, key)
            if linen is not None:
                call(linen)
            elif other in made:
                variables = made[other].init(key)
                made[other].run(call, variables, key, None, training=True)
            else:
                call(_NotMade())

        within([other for other in models if other != name], Models({name: called}))

    return fn
