"""Plans made by hand, for tests of how plans are shown."""

import dataclasses

from jaxpar.compiled.collectives import Collective
from jaxpar.compiled.program import CompiledProgram, Memory
from jaxpar.pipeline.schedules.catalog import make_schedule
from jaxpar.planner.plan import BytesPerDevice, Plan
from jaxpar.planner.roofline import Estimate
from jaxpar.planner.work import Links

GB = 10**9
MEMORY = BytesPerDevice(
    state=42 * GB + 33,
    padding=0,
    parameters=14 * GB,
    optimizer=28 * GB,
    batch=64_000,
    temporaries=33 * GB,
    copies=7 * GB,
    gradients=14 * GB,
    activations=12 * GB,
    peak=75 * GB,
)
COLLECTIVES = (
    Collective("all-gather", ("data",), "bf16", 64, 516, 26 * GB, GB),
    Collective("reduce-scatter", ("data",), "bf16", 64, 259, 13 * GB, GB),
    Collective("all-reduce", ("data", "tensor"), "f32", 64, 2, 24, 12),
    Collective("collective-permute", (), "f32", 2, 1, 4, 4),
)
ESTIMATE = Estimate(
    step_seconds=5.0,
    mfu=0.412,
    bubble=0.1,
    matmul_seconds=3.0,
    memory_seconds=1.3,
    links_seconds=0.8,
    exposed_seconds=0.2,
    bubble_seconds=0.5,
)
TIMES = {"forward": 1.0, "backward": 2.0, "weight": 0.0}


def make_program(*collectives: Collective) -> CompiledProgram:
    return CompiledProgram(Memory(0, 0, 0, 0, 0, 0), {}, collectives, ())


def make_plan(**change) -> Plan:
    """7B on 64 GPUs, about; it fits, and has no pipeline."""
    right = {
        "target": "h200:8x8",
        "compiled_for": "cuda",
        "num_devices": 64,
        "mesh": {"data": 64, "pipe": 1, "tensor": 1},
        "zero": 3,
        "precision": "bfloat16",
        "num_params": 6_738_415_616,
        "memory": MEMORY,
        "device_memory_bytes": 150 * GB,
        "program": make_program(*COLLECTIVES),
        "links": Links(inside_host=5 * GB, between_hosts=33 * GB),
        "flops_per_step": 5 * 10**16,
        "model_flops_per_step": 4 * 10**16,
        "tokens_per_step": 10**6,
        "compile_seconds": 60.0,
        "estimate": ESTIMATE,
        "schedule": None,
        "schedule_times": {},
        "notes": ("attention is XLA's own",),
    }
    return Plan(**(right | change))


def make_cpu_plan(**change) -> Plan:
    """A tiny model on CPU devices: no limit, no links, no estimate."""
    sizes = dataclasses.asdict(MEMORY)
    memory = BytesPerDevice(**{name: n // 10**4 for name, n in sizes.items()})
    right = {
        "target": "cpu:8",
        "compiled_for": "cpu",
        "num_devices": 8,
        "memory": memory,
        "device_memory_bytes": None,
        "links": None,
        "estimate": None,
    }
    return make_plan(**(right | change))


def make_piped_plan(name: str, stages: int, microbatches: int, **change) -> Plan:
    """A plan whose schedule is of the catalog."""
    schedule = make_schedule(name, stages, microbatches)
    times = TIMES
    if schedule.splits_backward:
        times = {"forward": 1.0, "backward": 1.0, "weight": 1.0}
    return make_plan(schedule=schedule, schedule_times=times, **change)


CASES = {
    "fits": make_plan(),
    "does not fit": make_plan(device_memory_bytes=60 * GB),
    "fits just": make_plan(device_memory_bytes=76 * GB),
    "cpu": make_cpu_plan(),
    "almost empty": make_plan(memory=make_cpu_plan().memory),
    "nothing crosses": make_cpu_plan(program=make_program()),
    "1f1b": make_piped_plan("1f1b", 8, 32),
    "interleaved": make_piped_plan("interleaved:2", 4, 8),
    "zero bubble": make_piped_plan("zero_bubble", 2, 4),
}
