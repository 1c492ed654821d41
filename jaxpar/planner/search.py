"""Which choice is the fastest that fits: closed forms prune, compiled steps decide.

Choices are compiled in the order of their predicted time. Every compiled step shows
what closed forms can't: the memory of activations and the time of kernels other than
matmuls. The predictions of the remaining choices are updated with it.
"""

import concurrent.futures
import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxpar.mesh import DATA, TENSOR
from jaxpar.planner.choices import (
    REMATS,
    SEARCHED_AXES,
    Choice,
    ShapeFacts,
    Survey,
    bubble_of,
    choices,
    live_rows,
    remat_flops,
    sent_over_data,
    sent_over_tensor,
)
from jaxpar.planner.plan import Plan
from jaxpar.planner.roofline import link_rate
from jaxpar.planner.subprocess import CompilerProcessError
from jaxpar.planner.targets import Target

_SURELY_OVER = 1.15
"""Choices whose predicted peak is this many times the memory are not compiled."""

_FASTER_BY = 0.99
"""Choices alike but for ZeRO and micro-batches: a slower one is compiled up to this."""

TOP = 10


@dataclasses.dataclass(frozen=True)
class Prediction:
    """The predicted cost of a choice.

    Attributes:
      seconds: step time.
      peak: bytes on one device.
    """

    seconds: float
    peak: float


@dataclasses.dataclass(frozen=True)
class _Line:
    """Bytes as a linear function of rows, constant beyond `most` rows."""

    slope: float
    fixed: float
    most: float


@dataclasses.dataclass
class Search:
    """The state of a search, and its results.

    Attributes:
      survey: of the recipe.
      target: the devices.
      left: choices that may still be the best.
      plans: choice -> its plan, for those compiled.
      fallen: choice -> why it was excluded.
    """

    survey: Survey
    target: Target
    left: set[Choice]
    plans: dict[Choice, Plan]
    rejected: dict[Choice, str]
    _pruned: set[Choice] = dataclasses.field(default_factory=set)
    _lines: dict[Any, _Line | None] = dataclasses.field(default_factory=dict)
    _predicted: dict[Choice, Prediction] = dataclasses.field(default_factory=dict)
    _rates: dict[Any, float] = dataclasses.field(default_factory=dict)

    @property
    def ranking(self) -> list[tuple[Choice, Plan]]:
        """The choices that fit, fastest first."""
        fit = [(choice, plan) for choice, plan in self.plans.items() if plan.fits]
        return sorted(fit, key=lambda pair: (seconds_of(pair[1]), pair[0]))

    @property
    def memory(self) -> int:
        """Memory of one device, in bytes."""
        assert self.target.hardware is not None, "checked by start"
        return self.target.hardware.memory_bytes

    def facts(self, choice: Choice) -> ShapeFacts:
        """The facts of a choice's mesh and ZeRO stage."""
        found = self.survey.facts[choice.mesh]
        assert not isinstance(found, str), "refused shapes have no choices"
        return found[choice.zero]

    def predict(self, choice: Choice) -> Prediction:
        """Predict from closed forms and what was compiled."""
        if choice not in self._predicted:
            self._predicted[choice] = self._predict(choice)
        return self._predicted[choice]

    def _predict(self, choice: Choice) -> Prediction:
        survey, target, hardware = self.survey, self.target, self.target.hardware
        assert hardware is not None, "checked by start"
        facts = self.facts(choice)
        peak = hardware.peak[survey.dtype] * hardware.peak_achieved
        flops = survey.model_flops * remat_flops(choice.remat) / target.num_devices
        work = flops / peak + self._others(choice)
        bubble = bubble_of(choice)
        sent, hides = sent_over_data(facts, choice)
        over_data = sent / self._rate(DATA, choice.mesh)
        tensor = sent_over_tensor(survey, facts, choice)
        over_tensor = tensor / self._rate(TENSOR, choice.mesh)
        rule = max(0.0, over_data - work) if hides else over_data
        share = self._exposed_share(DATA, choice)
        waits = rule if share is None else share * over_data
        share = self._exposed_share(TENSOR, choice)
        waits += over_tensor if share is None else share * over_tensor
        return Prediction(
            work / (1 - bubble) + waits, facts.least + self._activations(choice)
        )

    def _rate(self, axis: str, mesh: tuple[int, int, int]) -> float:
        """Bytes per second over one axis."""
        if (axis, mesh) not in self._rates:
            sizes: dict[str, int] = dict(zip(SEARCHED_AXES, mesh, strict=True))
            self._rates[axis, mesh] = link_rate((axis,), self.target, sizes)
        return self._rates[axis, mesh]

    def _others(self, choice: Choice) -> float:
        """Seconds of non-matmul kernels, from the most similar compiled choice."""
        known = [
            (_kind(own), plan.estimate.memory_seconds)
            for own, plan in self.plans.items()
            if plan.estimate
        ]
        kind = _kind(choice)
        alike = [seconds for own, seconds in known if own == kind]
        piped = [seconds for own, seconds in known if own[1] == kind[1]]
        return min(alike or piped or [seconds for _, seconds in known], default=0.0)

    def _exposed_share(self, axis: str, choice: Choice) -> float | None:
        """The part of what is sent over an axis that kernels wait for.

        The least that a compiled schedule shows for this ZeRO stage, with and without a
        pipeline; None if there is none yet, or no schedule can be read.
        """
        kind = choice.zero, choice.mesh[1] > 1
        shares = [
            _exposed_share(plan, axis)
            for own, plan in self.plans.items()
            if (own.zero, own.mesh[1] > 1) == kind
        ]
        return min((share for share in shares if share is not None), default=None)

    def _line(self, kind: tuple[str | None, bool]) -> _Line | None:
        """Activations by rows, fitted to the compiled choices of a kind."""
        if kind not in self._lines:
            points = {
                live_rows(self.survey, own): float(plan.memory.activations)
                for own, plan in self.plans.items()
                if _kind(own) == kind
            }
            self._lines[kind] = _through(points) if points else None
        return self._lines[kind]

    def _activations(self, choice: Choice) -> float:
        """Bytes; a lower bound where only policies that store less are known."""
        remat, piped = _kind(choice)
        policies = REMATS[REMATS.index(remat) :] if remat in REMATS else (remat,)
        rows = live_rows(self.survey, choice)
        for policy in policies:
            line = self._line((policy, piped))
            if line is not None:
                return line.slope * min(rows, line.most) + line.fixed
        return 0.0

    def prune(self) -> None:
        """Exclude choices that can't fit, or can't be faster than similar ones.

        By what is predicted now: what was excluded by earlier predictions comes back.
        """
        for choice in self._pruned:
            del self.rejected[choice]
        self.left |= self._pruned
        self._pruned.clear()
        # Predicted, as the other choice is, unless it was found to be slower: XLA hides
        # less where memory is short, which smaller micro-batches need not be.
        mine = {
            own: max(self.predict(own).seconds, seconds_of(plan))
            for own, plan in self.plans.items()
        }
        for choice in sorted(self.left):
            why = self._why_not(choice, mine)
            if why:
                self.left.discard(choice)
                self.rejected[choice] = why
                self._pruned.add(choice)

    def _why_not(self, choice: Choice, mine: Mapping[Choice, float]) -> str | None:
        least, memory = self.facts(choice).least, self.memory
        if least > memory:
            return (
                "state, copies and gradients alone need more than the memory: "
                f"{least / 1e9:.1f} of {memory / 1e9:.1f} GB"
            )
        predicted = self.predict(choice)
        if predicted.peak > _SURELY_OVER * memory:
            return (
                f"predicted from compiled choices: {predicted.peak / 1e9:.1f} of "
                f"{memory / 1e9:.1f} GB"
            )
        for own, plan in self.plans.items():
            if not _alike(own, choice):
                continue
            if not plan.fits and own.zero == choice.zero:
                if own.accumulate >= choice.accumulate:
                    return f"larger micro-batches than {own.accumulate}, too large"
            elif plan.fits and predicted.seconds > _FASTER_BY * mine[own]:
                return (
                    f"predicted no faster than ZeRO {own.zero}, accumulate "
                    f"{own.accumulate}, which was compiled"
                )
        return None

    def note(self, choice: Choice, found: Plan | str) -> None:
        """Record the result of compiling a choice: its plan, or why it failed."""
        self.left.discard(choice)
        if isinstance(found, str):
            self.rejected[choice] = found
            return
        self.plans[choice] = found
        self._lines.clear()
        self._predicted.clear()
        if not found.fits:
            peak, memory = found.memory.peak / 1e9, self.memory / 1e9
            self.rejected[choice] = f"compiled: takes {peak:.1f} of {memory:.1f} GB"

    def next(self, number: int) -> list[Choice]:
        """The most promising choices, dissimilar to each other."""
        found: list[Choice] = []
        order = sorted(self.left, key=self._promise)
        for choice in order:
            if len(found) < number and not any(_alike(choice, o) for o in found):
                found.append(choice)
        return found

    def _promise(self, choice: Choice) -> tuple:
        """Sort key: time, then memory, then simplicity."""
        own = self.predict(choice)
        fits = own.peak <= self.memory
        return (not fits, round(own.seconds, 6), own.peak, choice)

    def is_decided(self) -> bool:
        """Whether none of the remaining choices can be among the best."""
        best = self.ranking
        if not self.left:
            return True
        if len(best) < TOP:
            return False
        soonest = min(self.predict(choice).seconds for choice in self.left)
        return soonest > seconds_of(best[TOP - 1][1])


def require_rates(target: Target) -> None:
    """Reject targets whose choices can't be ranked.

    Raises:
      ValueError: if the target is of CPUs.
    """
    if target.hardware is None:
        raise ValueError(
            f"target={target.name!r}: no rates of CPUs are known, so choices can't be "
            "ranked; search on a GPU or TPU, such as h200:1x8."
        )


def start(survey: Survey, target: Target) -> Search:
    """Begin a search: list the choices, and exclude those that need no compiler.

    Raises:
      ValueError: if the target has no rates, or no choice is possible.
    """
    require_rates(target)
    found = Search(survey, target, set(choices(survey)), {}, {})
    if not found.left:
        said = sorted({f for f in survey.facts.values() if isinstance(f, str)})
        raise ValueError(
            f"target={target.name!r}: no mesh of its {target.num_devices} devices is "
            f"possible for {survey.rows} rows. " + " ".join(said[:3])
        )
    found.prune()
    return found


def run(
    search: Search,
    compile_plan: Callable[[Choice], Plan],
    *,
    compiles: int,
    jobs: int,
    report: Callable[[Choice, Plan | str], None] = lambda choice, found: None,
) -> None:
    """Compile the most promising choices until the best are known.

    Args:
      search: a new one; it is updated in place.
      compile_plan: compiles one choice; may raise ValueError or
        CompilerProcessError, after which the search continues.
      compiles: steps to compile at most.
      jobs: how many at once.
      report: called with each choice as it is compiled, and its plan or why it failed.
    """
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        while compiles > 0 and not search.is_decided():
            batch = search.next(min(jobs, compiles))
            compiles -= len(batch)
            for choice, found in zip(
                batch,
                pool.map(lambda c: attempt(compile_plan, c), batch),
                strict=True,
            ):
                search.note(choice, found)
                report(choice, found)
            search.prune()
    for choice in search.left:
        seconds = search.predict(choice).seconds
        search.rejected[choice] = f"not compiled: predicted to take {seconds:.3g} s"
    search.left.clear()


def attempt(compile_plan: Callable[[Choice], Plan], choice: Choice) -> Plan | str:
    """Compile a choice; return why it failed, if it does."""
    try:
        return compile_plan(choice)
    except (ValueError, CompilerProcessError) as error:
        return str(error)


def seconds_of(plan: Plan) -> float:
    """The step time of a plan's estimate."""
    assert plan.estimate is not None, "searches are of targets with rates"
    return plan.estimate.step_seconds


def _exposed_share(plan: Plan, axis: str) -> float | None:
    """The part of what a plan's step sends over one axis that kernels wait for."""
    found = plan.program.communication
    rows = [row for row in found.collectives if row.axes == (axis,)] if found else []
    wire = sum(row.wire_seconds for row in rows)
    return sum(row.exposed_seconds for row in rows) / wire if wire else None


def _through(points: Mapping[float, float]) -> _Line:
    """Fit a line to rows -> bytes.

    Through a single point the slope is unknown, because some bytes do not grow with the
    rows: the point's bytes are predicted for more rows too.
    """
    if len(points) == 1:
        ((rows, number),) = points.items()
        return _Line(number / rows, 0.0, rows)
    slope, fixed = np.polyfit(list(points), list(points.values()), 1)
    return _Line(max(0.0, float(slope)), max(0.0, float(fixed)), math.inf)


def _kind(choice: Choice) -> tuple[str | None, bool]:
    """The fields that decide how much is stored per row."""
    return choice.remat, choice.mesh[1] > 1


def _alike(one: Choice, other: Choice) -> bool:
    """Whether two choices differ only in ZeRO and micro-batches."""
    return (one.mesh, one.schedule, one.remat) == (
        other.mesh,
        other.schedule,
        other.remat,
    )


def reasons(rejected: Iterable[str]) -> Sequence[tuple[str, int]]:
    """Count the reasons for exclusion, most frequent first, without their numbers."""
    counted: dict[str, int] = {}
    for why in rejected:
        kind = why.partition(":")[0].partition(" than ZeRO")[0][:60]
        counted[kind] = counted.get(kind, 0) + 1
    return sorted(counted.items(), key=lambda pair: -pair[1])
