"""Is a step's time that of its parts, each over its rate, as by hand?"""

import dataclasses

import pytest

from jaxpar.compiled.collectives import Collective
from jaxpar.compiled.exposed import Communication, Waited
from jaxpar.compiled.hardware import Hardware
from jaxpar.mesh import MeshShape
from jaxpar.planner.roofline import Work, assumptions, estimate
from jaxpar.planner.targets import Target, parse_target
from jaxpar.planner.work import Traffic
from jaxpar.step.update import HostTraffic

# Round numbers: 100 FLOP/s, 10 bytes/s of memory, 8 and 1 bytes/s of links, halved.
HARDWARE = Hardware(
    kind="toy", name="Toy", called=(), platform="cuda",
    memory_bytes=1000, memory_rate=10.0,
    memory_achieved=0.5, peak={"float32": 100.0, "bfloat16": 200.0}, peak_achieved=0.5,
    inside_host=8.0, between_hosts=1.0, links_achieved=0.5,
    host_memory_bytes=2000, host_rate=2.0, host_achieved=0.5,
    host_memory_rate=4.0, disk_rate=1.0, compiler={},
    sources={"memory": "m", "peak": "p", "links": "l", "host": "h", "host_work": "w"},
)  # fmt: skip
TARGET = Target("toy:2x4", 2, 4, HARDWARE)
WORK = Work(
    flops=1000.0, model_flops=750.0, dtype="float32", traffic=Traffic(20, 50),
    collectives=(), bubble=0.0, zero=1,
)  # fmt: skip


def estimated(mesh: MeshShape = MeshShape(data=4, tensor=2), **change):  # noqa: B008
    work = dataclasses.replace(WORK, **change)
    found = estimate(work, TARGET, dataclasses.asdict(mesh))
    assert found is not None
    return found


def test_products_and_other_kernels_follow_each_other():
    found = estimated()
    assert found.matmul_seconds == 1000 / 50
    assert found.memory_seconds == 50 / 5
    assert found.step_seconds == 30
    assert found.mfu == pytest.approx(750 / (30 * 100))


def test_products_that_are_small_wait_for_memory():
    assert estimated(traffic=Traffic(200, 50)).matmul_seconds == 200 / 5


def test_rate_is_that_of_the_compute_dtype():
    assert estimated(dtype="bfloat16").matmul_seconds == 1000 / 100


def test_bubble_is_idle_time_beside_the_work():
    found = estimated(bubble=0.25)
    assert found.bubble_seconds == pytest.approx(10)
    assert found.step_seconds == pytest.approx(40)


def gathered(axes: tuple[str, ...], kind: str = "all-gather") -> Collective:
    return Collective(kind, axes, "bf16", 2, 1, 16, 16)


def test_once_a_step_collectives_are_waited_for_at_their_link_s_rate():
    # Tensor is inside a host; data spans two, with two of its four on each.
    inside = estimated(collectives=(gathered(("tensor",)),))
    assert inside.exposed_seconds == 8 / 4
    between = estimated(collectives=(gathered(("data",)),))
    assert between.exposed_seconds == 8 / (2 * 0.5)
    assert between.step_seconds == 30 + between.exposed_seconds


def test_gathers_of_every_layer_run_beside_the_products():
    hidden = estimated(collectives=(gathered(("data",)),), zero=3)
    assert hidden.links_seconds == 8
    assert hidden.exposed_seconds == 0
    longer = dataclasses.replace(gathered(("data",)), bytes=16 * 10)
    assert estimated(collectives=(longer,), zero=3).exposed_seconds == 80 - 30


def test_at_stage_2_gradients_run_beside_and_parameters_do_not():
    rows = (gathered(("data",)), gathered(("data",), "reduce-scatter"))
    assert estimated(collectives=rows, zero=2).exposed_seconds == 8


def test_a_schedule_says_what_is_exposed_where_there_is_one():
    waited = Waited("g", "all-gather", ("data",), 1, False, 8, 8.0, 3.0)
    scheduled = Communication(kernel_seconds=30.0, collectives=(waited,))
    for zero in (1, 3):
        rows = (gathered(("data",)),)
        found = estimated(collectives=rows, zero=zero, communication=scheduled)
        assert (found.links_seconds, found.exposed_seconds) == (8.0, 3.0)
        assert found.step_seconds == 30 + 3


def test_without_a_schedule_the_assumptions_say_so():
    said = assumptions(parse_target("v5e:2x4"), is_scheduled=False)[-1]
    assert said.startswith("the program has no schedule that can be read")


def test_what_a_pipeline_sends_runs_beside():
    found = estimated(
        MeshShape(data=4, pipe=2),
        collectives=(gathered(("pipe",), "collective-permute"),),
    )
    assert (found.exposed_seconds, found.step_seconds) == (0, 30)


def test_cpus_have_no_rates():
    sizes = {"data": 8, "pipe": 1, "tensor": 1}
    assert estimate(WORK, parse_target("cpu:8"), sizes) is None
    assert assumptions(parse_target("cpu:8"), is_scheduled=False)[0].startswith(
        "no rates of CPUs"
    )


def test_assumptions_name_the_link_to_the_host_where_it_is_used():
    def said(target: str, **given: bool) -> str:
        return "\n".join(assumptions(parse_target(target), **given))

    assert "host at 87%" not in said("h200:1x8", is_scheduled=True)
    found = said("h200:1x8", is_scheduled=True, copies=True)
    assert "a device copies to its host" in found
    assert "at 87% of 63 GB/s (PCIe 5.0 x16" in found
    unknown = said("v5e:2x4", is_scheduled=False, copies=True)
    assert "copies between the device and its host are not part of" in unknown


def test_assumptions_name_rates_and_sources():
    told = "\n".join(assumptions(parse_target("h200:1x8"), is_scheduled=True))
    for part in ("80% of the peak of 989 TFLOP/s", "90% of the memory's 4.80 TB/s",
                 "450 GB/s inside its host", "S. Bekman", "NVLink 4",
                 "the compiled schedule has between its start"):  # fmt: skip
        assert part in told


def test_the_host_works_between_the_programs() -> None:
    """By the slower of its memory and its disks, which work at once."""
    plain = estimated()
    for host, seconds in ((HostTraffic(memory=8), 2.0), (HostTraffic(8, 3), 3.0)):
        own = estimated(host=host)
        assert own.host_seconds == seconds
        assert own.step_seconds == plain.step_seconds + seconds
    said = assumptions(TARGET, is_scheduled=True, host=HostTraffic(memory=8))
    assert any(
        "updates its part of the state" in line and "(w)" in line for line in said
    )
    plain_lines = assumptions(TARGET, is_scheduled=True)
    assert not any("updates its part" in line for line in plain_lines)
