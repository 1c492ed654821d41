"""What does a loss see of the state: all of it, or its own part of several losses'?

With several losses the packed state has, by loss, the parameters that it trains, the
optimizer's state and the carried parts. A loss's step is written for a state of one
loss: what it doesn't train is frozen there.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, NoReturn

import jax

from jaxpar import tree
from jaxpar.step.state import TrainState
from jaxpar.step.train_step import TrainStep
from jaxpar.step.update import Update
from jaxpar.types import Batch, Metrics, Params, PyTree

STEP = "step"
"""The part of a loss's carried state that counts its steps."""


@dataclasses.dataclass(frozen=True)
class Focus:
    """The state of an engine with one loss, which sees all of it.

    Attributes:
      name: the loss's name; None if it is the only one.
    """

    name: str | None = None

    def get(self, packed: TrainState) -> TrainState:
        """What the loss sees of the packed state, as one of a single loss."""
        return packed

    def put(self, packed: TrainState, new: TrainState) -> TrainState:
        """The packed state with what the loss changed."""
        del packed
        return new

    def carried(self, state: TrainState) -> Mapping[str, PyTree]:
        """The loss's carried parts."""
        return state.carried


@dataclasses.dataclass(frozen=True)
class UpdateByLoss(Update):
    """The optimizers of several losses, each of which trains its own parameters.

    Attributes:
      updates: loss -> its optimizer.
      names: loss -> the parameters that it trains.
    """

    updates: Mapping[str, Update]
    names: Mapping[str, frozenset[str]]

    def pack(self, params: PyTree, opt_state: PyTree) -> tuple[PyTree, PyTree]:
        """See `Update`; the packed form has the parameters by loss."""
        return self._by_loss("pack", self._parted(params), opt_state)

    def unpack(self, params: PyTree, opt_state: PyTree) -> tuple[PyTree, PyTree]:
        """See `Update`."""
        params, opt_state = self._by_loss("unpack", params, opt_state)
        return _joined(params), opt_state

    def logical_shardings(
        self, params: PyTree, opt_state: PyTree
    ) -> tuple[PyTree, PyTree]:
        """See `Update`."""
        found = self._by_loss("logical_shardings", self._parted(params), opt_state)
        return _joined(found[0]), found[1]

    def shardings(self, params: PyTree, opt_state: PyTree) -> tuple[PyTree, PyTree]:
        """See `Update`."""
        return self._by_loss("shardings", self._parted(params), opt_state)

    def at_new_params(self, opt_state: PyTree) -> PyTree:
        """See `Update`."""
        own = self.updates.items()
        return {loss: update.at_new_params(opt_state[loss]) for loss, update in own}

    def apply(self, *_: Any, **__: Any) -> NoReturn:
        """Raise: each loss's own optimizer takes its steps, of what the loss sees."""
        raise NotImplementedError("a step of several losses is a step of one of them")

    def notes(self) -> tuple[str, ...]:
        """See `Update`."""
        lines = [line for update in self.updates.values() for line in update.notes()]
        return tuple(dict.fromkeys(lines))

    def _parted(self, params: PyTree) -> dict[str, PyTree]:
        return {loss: tree.parted(params, own)[0] for loss, own in self.names.items()}

    def _by_loss(
        self, method: str, params: Mapping[str, PyTree], opt_state: PyTree
    ) -> tuple[PyTree, PyTree]:
        """Call a method of each optimizer; an optimizer state of () stays ()."""
        found = {
            loss: getattr(update, method)(
                params[loss], opt_state[loss] if opt_state else ()
            )
            for loss, update in self.updates.items()
        }
        states = {loss: state for loss, (_, state) in found.items()}
        return {loss: own for loss, (own, _) in found.items()}, opt_state and states


@dataclasses.dataclass(frozen=True)
class OneOfSeveral(Focus):
    """What one of several losses sees.

    Attributes:
      name: the loss's name.
      index: its place among them; its random numbers are its own.
      update: the optimizers.
      averages: name of a moving average that it may call -> (the loss that carries it,
        the model that it averages).
    """

    name: str = dataclasses.field(kw_only=True)
    index: int = dataclasses.field(kw_only=True)
    update: UpdateByLoss = dataclasses.field(kw_only=True)
    averages: Mapping[str, tuple[str, str]] = dataclasses.field(kw_only=True)

    def get(self, packed: TrainState) -> TrainState:
        """See `Focus`; what other losses train is frozen, in fp32."""
        others = {
            loss: update.unpack(packed.params[loss], ())[0]
            for loss, update in self.update.updates.items()
            if loss != self.name
        }
        averages = {
            name: packed.carried[loss][name][model]
            for name, (loss, model) in self.averages.items()
        }
        own = dict(packed.carried[self.name])
        return TrainState(
            step=own.pop(STEP),
            params=packed.params[self.name],
            frozen={**tree.merged(_joined(others), packed.frozen), **averages},
            model_state=packed.model_state,
            opt_state=packed.opt_state[self.name],
            key=jax.random.fold_in(packed.key, self.index),
            carried=own,
        )

    def put(self, packed: TrainState, new: TrainState) -> TrainState:
        """See `Focus`."""
        return dataclasses.replace(
            packed,
            step=packed.step + 1,
            params={**packed.params, self.name: new.params},
            model_state=new.model_state,
            opt_state={**packed.opt_state, self.name: new.opt_state},
            carried={**packed.carried, self.name: {STEP: new.step, **new.carried}},
        )

    def carried(self, state: TrainState) -> Mapping[str, PyTree]:
        """See `Focus`."""
        return state.carried[self.name]


def focused(step: TrainStep, focus: Focus) -> TrainStep:
    """A loss's step as one of the state of all losses."""

    def gradients(packed: TrainState, batch: Batch) -> Any:
        return step.gradients(focus.get(packed), batch)

    def update(packed: TrainState, before: Any) -> tuple[TrainState, Metrics]:
        new, metrics = step.update(focus.get(packed), before)
        return focus.put(packed, new), metrics

    def apply(packed: TrainState, before: Any) -> TrainState:
        return focus.put(packed, step.apply(focus.get(packed), before))

    return TrainStep(gradients, update, apply)


def joined_state(
    parts: Mapping[str, TrainState], models: Mapping[str, object]
) -> TrainState:
    """The state of several losses, from one of each.

    Args:
      parts: loss -> its state, logical; all of the same models and key.
      models: the models' names; other parameters are moving averages.
    """
    first = next(iter(parts.values()))
    params = _joined({loss: part.params for loss, part in parts.items()})
    whole = {
        name: own for name, own in tree.merged(*first.weights).items() if name in models
    }
    return TrainState(
        step=first.step,
        params=params,
        frozen=tree.parted(whole, tree.named_leaves(params).keys())[1],
        model_state=first.model_state,
        opt_state={loss: part.opt_state for loss, part in parts.items()},
        key=first.key,
        carried={loss: {STEP: p.step, **p.carried} for loss, p in parts.items()},
    )


def _joined(params: Mapping[str, Params]) -> Params:
    """The parameters that the losses train, as one tree."""
    return functools.reduce(tree.merged, params.values(), {})
