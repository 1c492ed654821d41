"""How are several losses one engine: each its own step, on one state?

``initialize(model={"gen": ..., "disc": ...}, loss_fn={"gen": f, "disc": g})``: a loss
trains the model of its name, or what `trains` says; all else is frozen to it, as
parameters are that nothing trains.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax

from jaxpar import tree
from jaxpar.engine.focus import Focus, OneOfSeveral, UpdateByLoss, joined_state
from jaxpar.engine.make_step import MadeRun, MadeStep, make_step
from jaxpar.engine.placement import Placement
from jaxpar.engine.read_arguments import LossSpec, RunSpec, read_loss
from jaxpar.mesh import PIPE
from jaxpar.model.bridge import Network, UnderAxisRules
from jaxpar.model.several import SeveralNetworks, make_networks
from jaxpar.model.trainable import trainable_names
from jaxpar.optim.ema import Ema
from jaxpar.step.state import TrainState
from jaxpar.step.update import HostUpdate

_BY_LOSS: dict[str, Any] = {
    "loss_fn": ...,
    "optimizer": ...,
    "sample_batch": ...,
    "eval_fn": None,
    "accumulate": 1,
    "clip_norm": None,
    "carried": (),
}
"""Arguments that may be dicts by the losses' names -> the value of a loss that is not
in the dict; ... if it must be."""


_OF_A_BATCH = " (a batch with a loss's name among its keys: {{{0!r}: batch, ...}})"


def check_one(arguments: Mapping[str, Any]) -> None:
    """Check that an engine of one model has no argument for several.

    Raises:
      ValueError: if it has.
    """
    for name in ("trains", "init_from"):
        if arguments[name] is not None:
            remedy = " Pass trainable= instead." if name == "trains" else ""
            raise ValueError(
                f"{name}={arguments[name]!r} is for several models, "
                f"model={{'a': ..., 'b': ...}}, and there is one.{remedy}"
            )


def make_several(run: RunSpec, arguments: Mapping[str, Any]) -> MadeRun:
    """Make the steps of several losses.

    Args:
      run: what the losses share.
      arguments: those of `jaxpar.initialize`.

    Raises:
      ValueError: if they are inconsistent.
    """
    models = dict(arguments["model"])
    _check_several(run, arguments, models)
    given = _by_loss(arguments)
    specs = {loss: read_loss(run, own, loss) for loss, own in given.items()}
    network = _network(models, specs, arguments["init_from"] or {})
    names = _trained(network, arguments["trains"] or {}, specs)
    averages = _averages(specs, names, network)
    seen = _networks(network, names, averages)
    of_model = {name: model for name, (_, model) in averages.items()}
    made = {
        loss: make_step(
            run,
            dataclasses.replace(own, trainable=names[loss], averages=of_model),
            seen[loss],
        )
        for loss, own in specs.items()
    }
    update = UpdateByLoss({k: m.placement.update for k, m in made.items()}, names)
    _check_updates(made)
    focuses: dict[str | None, Focus] = {
        loss: OneOfSeveral(name=loss, index=index, update=update, averages=averages)
        for index, loss in enumerate(made)
    }

    def init(key: jax.Array) -> TrainState:
        parts = {loss: own.traced.init(key) for loss, own in made.items()}
        return joined_state(parts, models)

    placement = _placement(made, update, network, jax.eval_shape(init, _KEY))
    steps: dict[str | None, MadeStep] = {
        loss: _as_seen(own, focuses[loss], placement) for loss, own in made.items()
    }
    rebuilt = {
        "model": {k: UnderAxisRules(m, network.axis_rules) for k, m in models.items()},
        "sample_batch": {
            loss: own.batch_spec.rows(own.batch_spec.num_rows)
            for loss, own in specs.items()
        },
    }
    return MadeRun(network, placement, init, steps, focuses, rebuilt)


_KEY = jax.eval_shape(lambda: jax.random.key(0))


def _check_several(
    run: RunSpec, arguments: Mapping[str, Any], models: Mapping[str, Any]
) -> None:
    """Raise for arguments that several models don't take."""
    if run.mesh.shape[PIPE] > 1:
        raise ValueError(
            f"mesh: pipe={run.mesh.shape[PIPE]} cuts one model into stages, but model "
            f"has {len(models)} ({', '.join(models)}); use pipe=1 (data, tensor, and "
            "ZeRO 3 for large models)."
        )
    if arguments["trainable"] is not None:
        raise ValueError(
            "trainable: with several models each loss says what it trains: "
            "trains={'loss': ['model/*/lora_a']}."
        )
    if arguments["other_shapes"]:
        raise ValueError(
            "other_shapes: an engine with several losses takes batches of each loss's "
            "sample_batch alone; leave it out, or give the loss an engine of its own."
        )
    if not isinstance(arguments["loss_fn"], Mapping):
        raise ValueError(
            f"loss_fn: with several models ({', '.join(models)}) it must be a dict of "
            "losses by name, such as loss_fn={'" + next(iter(models), "a") + "': f}."
        )
    for argument in ("model", "loss_fn"):
        names = list(arguments[argument])
        wrong = [n for n in names if not isinstance(n, str) or not n or "/" in n]
        if wrong or not names:
            raise ValueError(
                f"{argument}: the name {wrong[0]!r} must be a word without a slash."
                if wrong
                else f"{argument}={{}} is empty; give at least one, by name."
            )


def _by_loss(arguments: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Each loss's own arguments."""
    losses = list(arguments["loss_fn"])
    found = {loss: dict(arguments) for loss in losses}
    for argument, default in _BY_LOSS.items():
        value = arguments[argument]
        named = isinstance(value, Mapping) and not value.keys().isdisjoint(losses)
        for loss in losses:
            if not named:
                found[loss][argument] = value
            elif loss in value:
                found[loss][argument] = value[loss]
            elif default is ...:
                batch = argument == "sample_batch"
                raise ValueError(
                    f"{argument}: it has none for the loss {loss!r}; give one for each "
                    f"of {', '.join(losses)}, or one for all"
                    f"{_OF_A_BATCH.format(losses[0]) if batch else ''}."
                )
            else:
                found[loss][argument] = default
        unknown = sorted(set(value) - set(losses)) if named else []
        if unknown:
            raise ValueError(
                f"{argument}: {unknown[0]!r} is none of the losses "
                f"({', '.join(losses)}).{tree.near_match(unknown[0], losses)}"
            )
    return found


def _network(
    models: Mapping[str, Any], specs: Mapping[str, LossSpec], copies: Mapping[str, str]
) -> SeveralNetworks:
    """All models as one network."""
    for name, source in copies.items():
        for each in (name, source):
            if each not in models:
                raise ValueError(
                    f"init_from: {each!r} is none of the models "
                    f"({', '.join(models)}).{tree.near_match(each, models)}"
                )
        if name == source or source in copies:
            raise ValueError(
                f"init_from: {name!r} copies {source!r}, which must be another model "
                "with parameters of its own."
            )
    losses = [own.loss.on_sample for own in specs.values()]
    samples = [own.rows for own in specs.values()]
    return SeveralNetworks(make_networks(models, losses, samples), copies)


def _trained(
    network: SeveralNetworks, trains: Mapping[str, Any], specs: Mapping[str, LossSpec]
) -> dict[str, frozenset[str]]:
    """The parameters that each loss trains."""
    params, _ = jax.eval_shape(network.init, _KEY)
    names = list(tree.named_leaves(params))
    unknown = [loss for loss in trains if loss not in specs]
    if unknown:
        raise ValueError(
            f"trains: {unknown[0]!r} is none of the losses ({', '.join(specs)})."
        )
    found: dict[str, frozenset[str]] = {}
    for loss in specs:
        if loss not in trains and loss not in network.networks:
            raise ValueError(
                f"trains: the loss {loss!r} has no model of its name "
                f"({', '.join(network.networks)}); say what it trains: "
                f"trains={{{loss!r}: ['{next(iter(network.networks))}/*']}}."
            )
        patterns = trains.get(loss, [f"{loss}/*"])
        own = trainable_names(patterns, names, network, argument=f"trains[{loss!r}]")
        for other, taken in found.items():
            if own & taken:
                raise ValueError(
                    f"trains: {min(own & taken)} is trained by the losses {other!r} "
                    f"and {loss!r}; one loss trains a parameter: add the two up, or "
                    "give each its own."
                )
        found[loss] = own
    return found


def _models_of(names: frozenset[str]) -> frozenset[str]:
    return frozenset(name.split("/")[0] for name in names)


def _averages(
    specs: Mapping[str, LossSpec],
    names: Mapping[str, frozenset[str]],
    network: SeveralNetworks,
) -> dict[str, tuple[str, str]]:
    """Moving averages that losses may call -> (whose part it is, of which model)."""
    params, _ = jax.eval_shape(network.init, _KEY)
    found: dict[str, tuple[str, str]] = {}
    for loss, own in specs.items():
        models = _models_of(names[loss])
        whole = {name: params[name] for name in models}
        is_one = len(models) == 1 and names[loss] == tree.named_leaves(whole).keys()
        for part in own.carried:
            if not isinstance(part, Ema) or not is_one:
                continue
            if part.name in network.networks or part.name in found:
                raise ValueError(
                    f"carried: the average {part.name!r} of the loss {loss!r} has the "
                    "name of a model or of another average, by which losses call it; "
                    "give each loss its own, by another name: carried={"
                    f"{loss!r}: [jaxpar.Ema(..., name='{loss}_average')]}}."
                )
            (model,) = models
            found[part.name] = (loss, model)
    return found


def _networks(
    network: SeveralNetworks,
    names: Mapping[str, frozenset[str]],
    averages: Mapping[str, tuple[str, str]],
) -> dict[str, Network]:
    """What each loss calls: all models, and the moving averages."""
    trained = functools.reduce(frozenset.union, map(_models_of, names.values()))
    shared = {
        "averages": {name: model for name, (_, model) in averages.items()},
        "in_training": trained,
    }
    return {
        loss: dataclasses.replace(network, kept=_models_of(own), **shared)
        for loss, own in names.items()
    }


def _check_updates(made: Mapping[str, MadeStep]) -> None:
    """Raise for what a state of several losses can't hold."""
    for loss, own in made.items():
        placement = own.placement
        if isinstance(placement.update, HostUpdate):
            raise ValueError(
                f"optimizer: {type(placement.update).__name__} of the loss {loss!r} "
                "works on the host between two programs, which an engine with several "
                "losses does not do; give it another one, or an engine of its own."
            )
        for part in placement.carried:
            if part.per_shard or not part.saved:
                raise ValueError(
                    f"carried: {part.name!r} of the loss {loss!r} is of each data "
                    "shard, or not saved, which an engine with several losses does not "
                    "keep; reduce its gradients plainly, or give it an engine of its "
                    "own."
                )


def _placement(
    made: Mapping[str, MadeStep],
    update: UpdateByLoss,
    network: SeveralNetworks,
    abstract: TrainState,
) -> Placement:
    """Where the state of all losses is stored."""
    own = next(iter(made.values())).placement
    leaves = {
        name: leaf
        for name, leaf in own.leaves.items()
        if name.split("/")[0] in network.networks
    }
    return dataclasses.replace(
        own,
        abstract=abstract,
        leaves=leaves,
        update=update,
        carried=(),
        renamed=network.former_names,
    )


def _as_seen(made: MadeStep, focus: Focus, placement: Placement) -> MadeStep:
    """A step that knows in which dtypes its frozen parameters are stored."""
    frozen = jax.eval_shape(focus.get, placement.packed).frozen
    abstract = dataclasses.replace(made.placement.abstract, frozen=frozen)
    own = dataclasses.replace(made.placement, abstract=abstract)
    return dataclasses.replace(made, placement=own)
