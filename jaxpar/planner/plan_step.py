"""How is an engine's step planned: compiled for the target's devices and read."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from jaxpar import tree
from jaxpar.compiled.closed_form import step_bytes
from jaxpar.compiled.explain import COPIES, state_bytes
from jaxpar.compiled.hlo import parse
from jaxpar.compiled.program import CompiledProgram, join_programs, read_program
from jaxpar.engine.compiled_step import CompiledStep
from jaxpar.engine.initialize import initialize
from jaxpar.jaxprs.evaluate import flops
from jaxpar.mesh import (
    DATA,
    MeshShape,
    compile_only,
    lowering_platform,
    make_mesh,
    num_batch_shards,
)
from jaxpar.planner.plan import BytesPerDevice, Plan, backend_notes, split_memory
from jaxpar.planner.roofline import Work, estimate
from jaxpar.planner.subprocess import call
from jaxpar.planner.targets import Target, parse_target
from jaxpar.planner.work import Traffic, link_bytes, memory_traffic
from jaxpar.progress import waiting
from jaxpar.step.update import NO_TRAFFIC, HostTraffic, HostUpdate


def plan(
    engine: CompiledStep,
    target: str,
    *,
    mesh: MeshShape | None = None,
    tokens_per_step: int | None = None,
) -> Plan:
    """Plan an engine's step: compile it for hardware that need not be present.

    Compiles in a subprocess, which receives the arguments of `jaxpar.initialize` and
    the shapes of the batch; nothing is allocated.

    Args:
      engine: the engine.
      target: the devices, such as "h200:8x8", "v5p:4x4x4" or "cpu:8".
      mesh: devices by axis; None for the engine's mesh, with its data axis resized to
        use all devices.
      tokens_per_step: tokens of a step, to report tokens per second.

    Returns:
      The plan.

    Raises:
      ValueError: if there is no such target, or the mesh or the batch does not fit it.
      CompilerProcessError: if the compiler fails, crashes, or runs out of memory.
    """
    found = parse_target(target)
    if not engine.placement.can_run and mesh is None:
        return plan_step(engine, found, tokens_per_step)
    sizes = engine.placement.mesh.shape
    shape = mesh or MeshShape(**{**sizes, DATA: -1})
    args = (engine.arguments, target, shape, tokens_per_step, engine.name)
    with waiting(f"planning on {target}"):
        return call(f"{__name__}:plan_elsewhere", *args, what=f"plan on {target}")


def plan_elsewhere(
    arguments: Mapping[str, Any],
    target: str,
    shape: MeshShape,
    tokens: int | None,
    loss: str | None = None,
) -> Plan:
    """Plan from the arguments of `jaxpar.initialize`, in a process for compilers.

    Args:
      arguments: the arguments, with the batch as shapes.
      target: the devices.
      shape: devices by axis.
      tokens: of a step.
      loss: which of several losses.

    Returns:
      The plan.
    """
    found = parse_target(target)
    devices = found.devices()
    mesh = make_mesh(shape.resolve(len(devices)), devices)
    with compile_only():
        engine = initialize(**{**arguments, "mesh": mesh})
    return plan_step(engine.loss(loss), found, tokens)


def plan_step(
    engine: CompiledStep, target: Target, tokens_per_step: int | None
) -> Plan:
    """Compile the step for the devices of its mesh, which are a target's, and plan it.

    Raises:
      ValueError: if the target has another number of devices.
    """
    placement, spec = engine.placement, engine.spec
    mesh, execution = placement.mesh, spec.execution
    if target.num_devices != mesh.size:
        raise ValueError(
            f"target={target.name!r} has {target.num_devices} devices, but the mesh "
            f"has {mesh.size}; make the mesh from the target's devices."
        )
    began = time.perf_counter()
    traces, platform = engine.traces(), lowering_platform(mesh)
    lowered = engine.lowered(traces)
    compiled = {name: each.compile() for name, each in lowered.items()}
    compile_seconds = time.perf_counter() - began
    program, traffic, text = _read(engine, compiled, target)
    model_flops = spec.model_flops
    counted = sum(flops(traced.jaxpr.eqns) for traced in traces.values())
    total = execution.flops(counted, model_flops, num_batch_shards(mesh))
    work = Work(
        flops=total / mesh.size,
        model_flops=model_flops / mesh.size,
        dtype=str(spec.precision.compute_dtype),
        traffic=traffic,
        collectives=program.collectives,
        bubble=execution.bubble,
        zero=placement.zero.number,
        communication=program.communication,
        host=_host_traffic(engine),
    )
    hardware, sizes = target.hardware, dict(mesh.shape)
    links = hardware and link_bytes(program.collectives, sizes, target.devices_per_host)
    return Plan(
        target=target.name,
        compiled_for=platform,
        num_devices=mesh.size,
        mesh=sizes,
        zero=work.zero,
        precision=work.dtype,
        num_params=tree.num_elements(placement.abstract.params),
        memory=_memory(engine, program),
        device_memory_bytes=hardware.memory_bytes if hardware else None,
        program=program,
        links=links,
        flops_per_step=total,
        model_flops_per_step=model_flops,
        tokens_per_step=tokens_per_step,
        compile_seconds=compile_seconds,
        estimate=estimate(work, target, sizes),
        schedule=execution.schedule,
        schedule_times=dict(execution.times),
        notes=(
            *backend_notes(target, text),
            *engine.notes,
            *_host_notes(list(traces)),
        ),
        host=work.host,
        host_memory_bytes=hardware.host_memory_bytes if hardware else None,
    )


def _read(
    engine: CompiledStep, compiled: Mapping[str, jax.stages.Compiled], target: Target
) -> tuple[CompiledProgram, Traffic, str]:
    """A step's programs as one, their traffic through memory, and their text."""
    mesh, taken = engine.placement.mesh, engine.spec.execution.active_fraction
    texts = {name: each.as_text() or "" for name, each in compiled.items()}
    modules = {name: parse(text, taken) for name, text in texts.items()}
    per_host = target.devices_per_host
    programs = {
        name: read_program(compiled[name], mesh, module, devices_per_host=per_host)
        for name, module in modules.items()
    }
    moved = [memory_traffic(module) for module in modules.values()]
    products, others = (
        sum(getattr(each, kind) for each in moved) for kind in ("products", "others")
    )
    return join_programs(programs), Traffic(products, others), "".join(texts.values())


def _host_notes(parts: Sequence[str]) -> tuple[str, ...]:
    if len(parts) == 1:
        return ()
    return (
        f"the step is {len(parts)} programs ({', '.join(parts)}), between which the "
        "optimizer works on the host.",
    )


def _host_traffic(engine: CompiledStep) -> HostTraffic:
    update = engine.placement.update
    return update.traffic() if isinstance(update, HostUpdate) else NO_TRAFFIC


def _memory(engine: CompiledStep, program: CompiledProgram) -> BytesPerDevice:
    """A program's memory by kind."""
    own = engine.seen
    copies, gradients = step_bytes(own.trained, engine.closed_form, own.frozen)
    packed = state_bytes(engine.placement.packed)
    stored = {name: sum(number) for name, number in packed.items()}
    if not any(leaf.is_split for leaf in own.trained):
        # Copies that an update keeps are those that the step computes with.
        kept = sum(n for name, n in stored.items() if name.startswith(COPIES))
        copies = max(0, copies - kept)
    return split_memory(program, stored, copies=copies, gradients=gradients)
