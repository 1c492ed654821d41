"""Which mesh, ZeRO stage and schedule should a recipe have on a target?

The recipe is surveyed once, in a subprocess: its step is traced, not compiled, for
every mesh of the target's devices. Then the most promising choices are compiled, each
in a subprocess (`jaxpar.planner.search`).
"""

import dataclasses
import itertools
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxpar import tree
from jaxpar.compiled.closed_form import step_bytes
from jaxpar.compiled.explain import state_bytes, total
from jaxpar.config import parse
from jaxpar.engine.engine import Engine
from jaxpar.mesh import TENSOR, MeshShape, compile_only, make_mesh
from jaxpar.planner.choices import (
    KNOBS,
    REMATS,
    Choice,
    ShapeFacts,
    Survey,
    live_rows,
    shapes,
)
from jaxpar.planner.plan import Plan
from jaxpar.planner.recipe import answer_of, load_recipe, plan_in_subprocess
from jaxpar.planner.search import Search, attempt, require_rates, run, start
from jaxpar.planner.subprocess import call
from jaxpar.planner.targets import parse_target
from jaxpar.sharding.leaf_sharding import LeafSharding
from jaxpar.sharding.rules import axes_of
from jaxpar.sharding.zero import ZERO_STAGES, ZeroStage

COMPILES = 16
"""Steps that a search compiles by default."""

_USUAL_HOST = 8
"""GPUs of a host: a larger target fills a host before it adds another."""

Report = Callable[[Choice, Plan | str], None]


def search_recipe(
    path: Path,
    target: str,
    args: Sequence[str] = (),
    *,
    compiles: int = COMPILES,
    jobs: int | None = None,
    report: Report = lambda choice, found: None,
) -> Search:
    """Search for a recipe's fastest choices on a target.

    Args:
      path: the recipe; the fields mesh, zero, accumulate, schedule and remat of its
        Config are set, where it has them.
      target: the devices, not CPUs.
      args: the recipe's own flags; the fields that they set are not searched.
      compiles: steps to compile at most.
      jobs: how many at once; None for one per core, four at most.
      report: called with each choice as it is compiled.

    Returns:
      The search; `Search.ranking` is empty if nothing fits.

    Raises:
      ValueError: if nothing is possible on the target, or the file is not a recipe.
      CompilerProcessError: if the recipe can't be surveyed.
    """
    goal = parse_target(target)
    require_rates(goal)
    search = start(survey_in_subprocess(path, target, args), goal)
    run(
        search,
        lambda choice: plan_choice(path, target, args, search.survey, choice),
        compiles=compiles,
        jobs=jobs or min(4, os.cpu_count() or 1),
        report=report,
    )
    return search


def plan_choice(
    path: Path, target: str, args: Sequence[str], survey: Survey, choice: Choice
) -> Plan:
    """Compile one choice, in a subprocess; raises as `plan_in_subprocess` does."""
    return plan_in_subprocess(path, target, (*args, *choice.flags(survey.knobs)))


def smallest_target(
    path: Path, target: str, args: Sequence[str], *, most: int = 8, report: Report
) -> tuple[str, Choice, Plan] | None:
    """Find a larger target that a recipe fits, doubling its devices.

    On each, the choices predicted to need the least memory are compiled, at most three.

    Args:
      path: the recipe.
      target: where it does not fit.
      args: its flags.
      most: doublings to try.
      report: called with each choice as it is compiled.

    Returns:
      The target, a choice that fits, and its plan; None if none was found.
    """
    for name in itertools.islice(larger_targets(target), most):
        try:
            search = start(survey_in_subprocess(path, name, args), parse_target(name))
        except ValueError:  # No mesh of so many devices for these rows.
            continue
        for _ in range(3):
            choice = min(search.left, key=lambda c: _need(search, c), default=None)
            if choice is None:
                break
            report(choice, _tried(search, choice, path, args))
            search.prune()
        if search.ranking:
            return (name, *search.ranking[0])
    return None


def _tried(
    search: Search, choice: Choice, path: Path, args: Sequence[str]
) -> Plan | str:
    """Compile a choice for a search; return why it failed, if it does."""
    target, survey = search.target.name, search.survey
    made = attempt(lambda c: plan_choice(path, target, args, survey, c), choice)
    search.note(choice, made)
    return made


def _need(search: Search, choice: Choice) -> tuple[Any, ...]:
    """Sort key, least memory first: predicted, then by stored activations and rows."""
    kept = -REMATS.index(choice.remat) if choice.remat in REMATS else 0
    return search.predict(choice).peak, kept, live_rows(search.survey, choice), choice


def what_would_fit(
    path: Path,
    leaf: Plan,
    args: Sequence[str],
    *,
    compiles: int = 4,
    report: Report = lambda choice, found: None,
) -> list[tuple[Choice, Plan | str]]:
    """Compile the choices nearest to one that does not fit, until two do.

    Args:
      path: the recipe.
      leaf: one of the recipe, which does not fit.
      args: the recipe's flags; any of the knobs may be changed.
      compiles: steps to compile at most.
      report: called with each choice as it is compiled.

    Returns:
      (what was tried, its plan or why it failed), in that order; empty where no choice
        can fit.
    """
    target = leaf.target
    found = survey_in_subprocess(path, target, args, pins=False)
    search = start(found, parse_target(target))
    knobs: Mapping[str, Any] = found.knobs
    data, pipe, tensor = leaf.mesh.values()
    own = Choice(
        (data, pipe, tensor),
        leaf.zero,
        knobs.get("accumulate", 1),
        knobs.get("schedule") if pipe > 1 else None,
        knobs.get("remat"),
    )
    if own.mesh in found.facts:
        search.note(own, leaf)
    tried: list[tuple[Choice, Plan | str]] = []
    while search.left and len(tried) < compiles:
        search.prune()
        choice = min(search.left, key=lambda c: _nearness(search, own, c), default=None)
        if choice is None:
            break
        made = _tried(search, choice, path, args)
        tried.append((choice, made))
        report(choice, made)
        if sum(not isinstance(p, str) and bool(p.fits) for _, p in tried) > 1:
            break
    return tried


def _nearness(search: Search, own: Choice, choice: Choice) -> tuple[Any, ...]:
    """Sort key: choices that probably fit; then few changes; then fast ones."""
    predicted = search.predict(choice)
    changes = sum(
        getattr(own, field.name) != getattr(choice, field.name)
        for field in dataclasses.fields(Choice)
    )
    return (predicted.peak > search.memory, changes, predicted.seconds, choice)


def larger_targets(target: str) -> Iterator[str]:
    """Yield the names of targets twice as large, and so on."""
    found = parse_target(target)
    kind = target.partition(":")[0]
    hosts, devices = found.hosts, found.devices_per_host
    sides = [int(side) for side in found.topology.split("x")] if found.topology else []
    while True:
        if sides:
            sides[sides.index(min(sides))] *= 2
            yield f"{kind}:{'x'.join(map(str, sorted(sides)))}"
        elif devices < _USUAL_HOST:
            devices *= 2
            yield f"{kind}:{hosts}x{devices}"
        else:
            hosts *= 2
            yield f"{kind}:{hosts}x{devices}"


def survey_in_subprocess(
    path: Path, target: str, args: Sequence[str], *, pins: bool = True
) -> Survey:
    """Survey in a subprocess; raises as `plan_in_subprocess` does."""
    label = f"survey of {path.name} on {target}"
    asked = (path, target, args, pins)
    return answer_of(call(f"{__name__}:survey", *asked, what=label))


def survey(path: Path, target: str, args: Sequence[str], pins: bool = True) -> Survey:
    """Survey a recipe in this process, which must be prepared for compilers.

    Args:
      path: the recipe.
      target: the devices.
      args: its flags.
      pins: whether the fields that the flags set are fixed; otherwise they may vary.

    Returns:
      The facts for every mesh of the target's devices.

    Raises:
      ValueError: if the file is not a recipe.
    """
    goal = parse_target(target)
    recipe = load_recipe(path)
    config = parse(recipe.Config, recipe.__doc__, list(args), prog=str(path))
    fields = [field.name for field in dataclasses.fields(config)]
    knobs = {name: getattr(config, name) for name in KNOBS if name in fields}
    pinned = _pinned(args) if pins else frozenset()
    devices = list(goal.devices())
    tokens = getattr(recipe, "tokens_per_step", None)
    facts: dict[tuple[int, int, int], Any] = {}
    rows, flops, dtype = 0, 0, "bfloat16"
    for shape in shapes(goal, knobs):
        sizes = (shape.data, shape.pipe, shape.tensor)
        if not _as_pinned(shape, knobs, pinned):
            continue
        try:
            engine = _traced(recipe, config, knobs, shape, devices)
        except ValueError as error:
            facts[sizes] = str(error)
            continue
        rows, spec = engine.batch_spec.num_rows, engine.spec
        flops, dtype = spec.model_flops, str(spec.precision.compute_dtype)
        facts[sizes] = {zero.number: _facts(engine, zero) for zero in ZERO_STAGES}
    return Survey(
        rows=rows,
        tokens=tokens and tokens(config),
        model_flops=flops,
        dtype=dtype,
        knobs=knobs,
        pinned=pinned,
        facts=facts,
    )


def _traced(
    recipe: Any, config: Any, knobs: Any, shape: MeshShape, devices: list[Any]
) -> Engine:
    """A recipe's engine on one mesh: traced, not compiled."""
    simple: dict[str, Any] = {"mesh": shape, "accumulate": 1, "schedule": "1f1b"}
    changed = {name: value for name, value in simple.items() if name in knobs}
    with compile_only():
        return recipe.build(
            dataclasses.replace(config, **changed), make_mesh(shape, devices)
        )


def _facts(engine: Engine, zero: ZeroStage) -> ShapeFacts:
    """What one mesh and ZeRO stage hold, from the shardings of the leaves."""
    placement, spec = engine.placement, engine.spec
    sizes = dict(placement.mesh.shape)
    leaves = tree.named_leaves(tree.merged(*placement.abstract.weights))
    compute = {name: leaf.compute for name, leaf in placement.leaves.items()}
    leaf_shardings = spec.execution.shard_leaves(leaves, compute, zero, sizes, ("*",))
    own = dataclasses.replace(placement, leaves=leaf_shardings, zero=zero)
    update = placement.update.with_shardings(tuple(own.trained))
    state, _ = total(state_bytes(dataclasses.replace(own, update=update).packed))
    closed_form = dataclasses.replace(engine.closed_form, zero=zero, accumulate=1)
    copies, gradients = step_bytes(own.trained, closed_form, own.frozen)
    itemsize = spec.precision.compute_dtype.itemsize
    owned = itemsize * sum(
        math.prod(leaf.shape) // leaf.ways_computed for leaf in leaf_shardings.values()
    )
    reduced = sum(map(_reduced, leaf_shardings.values())) * itemsize
    return ShapeFacts(state, copies, gradients, owned, reduced)


def _reduced(leaf: LeafSharding) -> int:
    """Elements of a token's activations that are summed for a leaf split over tensor.

    A matrix split along its inputs sums its outputs in the forward pass. One split
    along its outputs sums the gradients of its inputs in the backward pass. Either way
    these are the dims that are not split, once per layer of a stack.
    """
    split = [TENSOR in axes_of(axes) for axes in leaf.compute]
    if sum(split) != 1 or len(leaf.shape) < 2:
        return 0
    kept = [n for n, is_split in zip(leaf.shape, split, strict=True) if not is_split]
    return kept[0] * kept[-1] if len(kept) > 1 else kept[0]


def _pinned(args: Sequence[str]) -> frozenset[str]:
    """Names of the flags given."""
    return frozenset(
        word.partition("=")[0].lstrip("-").replace("-", "_")
        for word in args
        if word.startswith("--")
    )


def _as_pinned(shape: MeshShape, knobs: Any, pinned: frozenset[str]) -> bool:
    """Whether a shape is one that the user's flags allow."""
    given = knobs.get("mesh", MeshShape())
    return all(
        getattr(given, axis) in (-1, size)
        for axis, size in dataclasses.asdict(shape).items()
        if f"mesh.{axis}" in pinned
    ) and ("mesh" in knobs or shape.pipe * shape.tensor == 1)
