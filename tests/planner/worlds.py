"""A model made up of formulas, for tests of searches: its truth is known."""

import dataclasses

from jaxpar.mesh import MeshShape
from jaxpar.planner.choices import Choice, ShapeFacts, Survey, bubble_of, shapes
from jaxpar.planner.plan import Plan
from jaxpar.planner.roofline import Estimate
from jaxpar.planner.targets import parse_target
from tests.planner.handmade import MEMORY, make_plan

KNOBS = {
    "mesh": MeshShape(),
    "zero": 1,
    "accumulate": 1,
    "schedule": "1f1b",
    "remat": "none",
}
KEPT = {"none": 60e6, "dots": 30e6, "full": 4e6}
"""Bytes that one token of all layers keeps for the backward pass, by remat policy."""


@dataclasses.dataclass(frozen=True)
class World:
    """A model of `psi` parameters that trains on rows of 2,048 tokens."""

    target: str = "h100:1x8"
    psi: float = 1.3e9
    rows: int = 64
    knobs: dict = dataclasses.field(default_factory=lambda: dict(KNOBS))
    pinned: frozenset[str] = frozenset()

    @property
    def tokens(self) -> int:
        return self.rows * 2048

    def facts(self, shape: MeshShape, zero: int) -> ShapeFacts:
        number = shape.data * shape.pipe * shape.tensor
        own = self.psi / shape.pipe / shape.tensor
        stored = 12 * (self.psi / number if zero else own)
        gathers = zero != 3 or shape.pipe > 1
        grads = 4 * (own if zero < 2 or shape.pipe > 1 else self.psi / number)
        return ShapeFacts(
            int(stored), int(2 * own * gathers), int(grads), int(2 * own), 300_000
        )

    def survey(self) -> Survey:
        target = parse_target(self.target)
        facts = {}
        for shape in shapes(target, self.knobs):
            mesh = (shape.data, shape.pipe, shape.tensor)
            if self.rows % shape.data:
                facts[mesh] = f"sample_batch: data={shape.data} must divide the rows."
            else:
                facts[mesh] = {zero: self.facts(shape, zero) for zero in range(4)}
        return Survey(
            rows=self.rows,
            tokens=self.tokens,
            model_flops=int(6 * self.psi * self.tokens),
            dtype="bfloat16",
            knobs=self.knobs,
            pinned=self.pinned,
            facts=facts,
        )

    def seconds(self, choice: Choice) -> float:
        """The truth: products, other kernels, and waits that grow with each axis."""
        number = parse_target(self.target).num_devices
        again = {"none": 1.0, "dots": 1.04, "full": 1.33}[choice.remat or "none"]
        work = 6 * self.psi * self.tokens * again / number / 800e12 * 1.4
        data, _, tensor = choice.mesh
        waits = 0.02 * (tensor - 1) + 0.004 * (data > 1) * (3 - choice.zero)
        small = 0.001 * choice.accumulate
        return work / (1 - bubble_of(choice)) + waits + small

    def peak(self, choice: Choice) -> float:
        """The truth: what rests, and tokens under way."""
        data, pipe, tensor = choice.mesh
        rows = self.rows / data / choice.accumulate
        under_way = min(2 * pipe - 1, choice.accumulate) / pipe if pipe > 1 else 1
        kept = KEPT[choice.remat or "none"] * (self.psi / 1.3e9)
        live = rows * 2048 * under_way * kept / 24 / tensor
        return self.facts(MeshShape(*choice.mesh), choice.zero).least + live + 1e9

    def plan(self, choice: Choice) -> Plan:
        """What compiling the choice would tell."""
        found, seconds = (
            self.facts(MeshShape(*choice.mesh), choice.zero),
            self.seconds(choice),
        )
        peak = int(self.peak(choice))
        memory = dataclasses.replace(
            MEMORY,
            state=found.state,
            copies=found.copies,
            gradients=found.gradients,
            activations=peak - found.least,
            peak=peak,
        )
        hardware = parse_target(self.target).hardware
        assert hardware is not None
        return make_plan(
            target=self.target,
            memory=memory,
            device_memory_bytes=hardware.memory_bytes,
            zero=choice.zero,
            estimate=Estimate(
                seconds, 0.4, bubble_of(choice), 0.0, 0.3 * seconds, 0.0, 0.0, 0.0
            ),
        )


@dataclasses.dataclass(frozen=True)
class CrowdedWorld(World):
    """As XLA schedules: where most of the memory is taken, little is hidden."""

    def seconds(self, choice: Choice) -> float:
        """The truth, longer near the limit."""
        hardware = parse_target(self.target).hardware
        assert hardware is not None
        is_crowded = self.peak(choice) > 0.75 * hardware.memory_bytes
        return super().seconds(choice) * (1.3 if is_crowded else 1.0)
