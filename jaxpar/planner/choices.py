"""Which choices does a run have, and what do they cost, before anything is compiled?

A `Survey` describes a recipe, counted from its traced step for every mesh shape. From
it, closed forms give a lower bound of a `Choice`'s memory and an approximate step time.
What closed forms can't know (activations, kernels other than matmuls) is taken from the
choices that have been compiled (`jaxpar.planner.search`).
"""

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping

from jaxpar.mesh import DATA, PIPE, TENSOR, MeshShape
from jaxpar.pipeline.schedules.catalog import make_schedule
from jaxpar.pipeline.schedules.table import cost
from jaxpar.planner.targets import Target

REMATS = ("none", "dots", "full")
SCHEDULES = ("1f1b", "interleaved", "zero_bubble")
"""GPipe has the bubble of 1f1b and holds more activations: never the better choice."""

SEARCHED_AXES = (DATA, PIPE, TENSOR)
"""The axes whose sizes a search chooses."""

KNOBS: tuple[str, ...] = ("mesh", "zero", "accumulate", "schedule", "remat")
"""Fields of a recipe's config that a search sets, where the config has them."""


@dataclasses.dataclass(frozen=True, order=True)
class Choice:
    """One way to distribute a run.

    Attributes:
      mesh: devices by axis.
      zero: the ZeRO stage.
      accumulate: micro-batches a step.
      schedule: of the pipeline; None without one, or where the recipe has no such knob.
      remat: the policy; None where the recipe has no such knob.
    """

    mesh: tuple[int, int, int]
    zero: int
    accumulate: int
    schedule: str | None = None
    remat: str | None = None

    def flags(self, knobs: Mapping[str, object]) -> tuple[str, ...]:
        """The recipe flags that make this choice.

        Args:
          knobs: those of `KNOBS` that the recipe has.
        """
        sizes = zip(SEARCHED_AXES, self.mesh, strict=True)
        flags = [word for a, n in sizes for word in (f"--mesh.{a}", str(n))]
        for name in KNOBS[1:]:
            value = getattr(self, name)
            if name in knobs and value is not None:
                flags += [f"--{name}", str(value)]
        return tuple(flags)

    def __str__(self) -> str:
        data, pipe, tensor = self.mesh
        said = [
            f"data {data} x pipe {pipe} x tensor {tensor}",
            f"ZeRO {self.zero}",
            f"accumulate {self.accumulate}",
        ]
        said += [self.schedule] if self.schedule else []
        said += [f"remat {self.remat}"] if self.remat else []
        return ", ".join(said)


@dataclasses.dataclass(frozen=True)
class ShapeFacts:
    """What is known of one mesh shape at one ZeRO stage, in bytes on one device.

    Attributes:
      state: the stored state.
      copies: parameters in the compute dtype, held through the step.
      gradients: their sums.
      owned: all parameters that a device computes with, in the compute dtype.
      reduced_per_token: bytes reduced over tensor per token, in a forward pass.
    """

    state: int
    copies: int
    gradients: int
    owned: int
    reduced_per_token: int

    @property
    def least(self) -> int:
        """The minimum that any step needs."""
        return self.state + self.copies + self.gradients


@dataclasses.dataclass(frozen=True)
class Survey:
    """What is known of a recipe, whatever its mesh.

    Attributes:
      rows: of the global batch.
      tokens: of a step; None where the recipe does not say.
      model_flops: three times those of the forward pass, over all devices.
      dtype: the dtype of matmuls.
      knobs: those of `KNOBS` that the config has -> their values as given.
      pinned: names that the user gave a flag for: "zero", "mesh.tensor" and so on.
      facts: mesh shape -> ZeRO stage -> facts; or why the shape is impossible.
    """

    rows: int
    tokens: int | None
    model_flops: int
    dtype: str
    knobs: Mapping[str, object]
    pinned: frozenset[str]
    facts: Mapping[tuple[int, int, int], Mapping[int, ShapeFacts] | str]


def shapes(target: Target, knobs: Mapping[str, object]) -> Iterator[MeshShape]:
    """Every mesh of a target's devices; tensor stays within a host.

    Args:
      target: the devices.
      knobs: without a schedule among them, there is no pipe axis.
    """
    number = target.num_devices
    for tensor in _divisors(number):
        if target.devices_per_host % tensor:
            continue
        for pipe in _divisors(number // tensor):
            if pipe == 1 or "schedule" in knobs:
                yield MeshShape(number // tensor // pipe, pipe, tensor)


def choices(survey: Survey) -> Iterator[Choice]:
    """Every choice for the possible shapes; pinned values stay as given."""
    for mesh, facts in survey.facts.items():
        if isinstance(facts, str):
            continue
        data, pipe, _ = mesh
        remats = _values(survey, "remat", REMATS)
        for zero in _values(survey, "zero", (0, 1) if pipe > 1 else (0, 1, 2, 3)):
            for accumulate in _accumulations(survey, data, pipe):
                for schedule in _schedules(survey, pipe, accumulate):
                    for remat in remats:
                        yield Choice(mesh, zero, accumulate, schedule, remat)


def bubble_of(choice: Choice) -> float:
    """Idle fraction of the choice's schedule, where a backward takes two forwards."""
    if choice.schedule is None:
        return 0.0
    return _bubble(choice.schedule, choice.mesh[1], choice.accumulate)


@functools.cache
def _bubble(name: str, stages: int, microbatches: int) -> float:
    schedule = make_schedule(name, stages, microbatches)
    weight = 1.0 if schedule.splits_backward else 0.0
    return cost(schedule, backward=2 - weight, weight=weight).bubble


def live_rows(survey: Survey, choice: Choice) -> float:
    """Rows whose activations one device holds, in units of the full model.

    A pipeline stage holds its share of the layers for as many micro-batches as there
    are stages; tensor splits what a layer stores.
    """
    data, pipe, tensor = choice.mesh
    rows = survey.rows / data / choice.accumulate
    if pipe > 1:
        under_way = min(2 * pipe - 1, choice.accumulate)
        under_way *= 1.5 if choice.schedule == "zero_bubble" else 1.0
        rows *= under_way / pipe
    return rows / tensor


def remat_flops(remat: str | None) -> float:
    """FLOPs with recomputation over those without, approximately."""
    return {"full": 4 / 3, "dots": 1.05}.get(remat or "none", 1.0)


def sent_over_data(facts: ShapeFacts, choice: Choice) -> tuple[float, bool]:
    """Bytes that a device sends over data, and whether matmuls hide them."""
    data, pipe, _ = choice.mesh
    share, own = (data - 1) / data, facts.owned
    times = choice.accumulate if pipe == 1 else 1
    if choice.zero == 3 and pipe == 1:
        return 3 * times * share * own, True
    if choice.zero == 2 and pipe == 1:
        return (1 + times) * share * own, False
    return 2 * share * own, False


def sent_over_tensor(survey: Survey, facts: ShapeFacts, choice: Choice) -> float:
    """Bytes that a device sends over tensor: forward, backward and recomputation."""
    data, pipe, tensor = choice.mesh
    tokens = (survey.tokens or survey.rows) / data / pipe
    passes = 3 if choice.remat == "full" else 2
    share = 2 * (tensor - 1) / tensor
    return passes * share * tokens * facts.reduced_per_token / 2


def _values(survey: Survey, knob: str, usual: tuple) -> tuple:
    if knob not in survey.knobs:
        return (None,) if knob == "remat" else (1,)
    return (survey.knobs[knob],) if knob in survey.pinned else usual


def _accumulations(survey: Survey, data: int, pipe: int) -> tuple[int, ...]:
    """Numbers of micro-batches: every divisor; with a pipeline, those that fill it."""
    if survey.rows % data:
        return ()
    every = _divisors(survey.rows // data)
    found = _values(survey, "accumulate", every)
    filling = tuple(n for n in found if n >= pipe and n in every)
    return filling or tuple(n for n in found if n in every)


def _schedules(survey: Survey, pipe: int, accumulate: int) -> tuple[str | None, ...]:
    if pipe == 1:
        return (None,)
    found = _values(survey, "schedule", SCHEDULES)
    return tuple(s for s in found if s != "interleaved" or accumulate % pipe == 0)


def _divisors(number: int) -> tuple[int, ...]:
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return tuple(sorted({*small, *(number // n for n in small)}))
