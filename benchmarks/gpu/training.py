"""How fast is a training step, what does it hold, and where does its time go?

The contestants take the same batches (`benchmarks.contestants`); a rate is the median
over rounds of steps, with the slowest and the fastest beside it.
"""

import statistics
import subprocess
import sys
import time
from collections.abc import Iterable
from typing import Any

import jax

from benchmarks.contestants import protocol
from benchmarks.contestants.runner import HERE, Contestant
from benchmarks.gpu.roofline import hardware_here, time_by_kernel
from benchmarks.gpu.session import NotHereError, Rows, Session
from benchmarks.gpu.workloads import CONVENTION, Workload, of_model, of_shape
from jaxpar.compiled.hardware import hardware_of
from jaxpar.compiled.hlo import parse
from jaxpar.compiled.program import read_program
from jaxpar.jaxprs.evaluate import flops
from jaxpar.planner.roofline import Work, estimate
from jaxpar.planner.targets import parse_target
from jaxpar.planner.work import memory_traffic

ROUNDS, STEPS, WARM = 6, 10, 5
SECONDS = 30.0
"""Of all rounds, at most, but for two steps a round."""


def engine(session: Session, shape: str, again: bool = False) -> Rows:
    """The engine's step: rate, memory, and the estimates for it.

    Args:
      session: where it runs.
      shape: of `protocol.SHAPES`.
      again: only the rate.
    """
    workload = of_shape(shape)
    yield "step", timed(session, workload)
    if not again:
        yield "predicted", predicted_beside(session, workload)


def kernels(session: Session, shape: str) -> Rows:
    """Where the engine's time goes: by category over the roofline, and by kernel."""
    yield from time_by_kernel(session, of_shape(shape))


def llama(session: Session, model: str, bits: int | None) -> Rows:
    """A row of the model's longest sequence with full remat, and its optimizer."""
    workload = of_model(model, batch=1, remat="full", bits=bits)
    yield "step", timed(session, workload)
    yield "predicted", predicted_beside(session, workload)


def llama_kernels(session: Session, model: str, bits: int | None) -> Rows:
    """Where the time of the same step goes."""
    workload = of_model(model, batch=1, remat="full", bits=bits)
    yield from time_by_kernel(session, workload)


def predicted(session: Session, model: str, batch: int, remat: str) -> Rows:
    """What the compiled step should need and take, beside what it does."""
    workload = of_model(model, batch=batch, remat=remat)
    yield "step", timed(session, workload)
    yield "predicted", predicted_beside(session, workload)


def by_hand(session: Session, shape: str) -> Rows:
    """The step written by hand in JAX."""
    command = [sys.executable, str(HERE / "plain_gpt.py"), shape]
    yield "step", of_contestant(session, command, shape)


def torch(session: Session, shape: str, mode: str, attention: str) -> Rows:
    """Torch's step with fused AdamW.

    Args:
      session: where it runs.
      shape: of `protocol.SHAPES`.
      mode: of torch.compile, "compile" for the default.
      attention: the kernel, "flash" or "cudnn".

    Raises:
      NotHereError: if there is no torch.
    """
    require_torch(session)
    script = str(HERE / "torch_gpt.py")
    command = [session.torch_python, script, shape, mode, attention]
    yield "step", of_contestant(session, command, shape)


def of_contestant(session: Session, command: list[str], shape: str) -> dict[str, Any]:
    """What a contestant in a process of its own takes."""
    own = protocol.SHAPES[shape]
    rounds, steps = (2, 2) if session.dry else (ROUNDS, STEPS)
    contestant = Contestant([command])
    try:
        versions = contestant.read()["versions"]
        answers = [contestant.take(WARM, steps)]
        answers += [contestant.take(0, steps) for _ in range(rounds - 1)]
    finally:
        contestant.stop()
    causal = own.flops_per_token - own.causal_attention_flops
    found = rates(
        [answer["seconds_per_step"] for answer in answers],
        own.tokens,
        {"full": own.tokens * own.flops_per_token, "causal": own.tokens * causal},
        device_kind=None,
    )
    last = answers[-1]
    found["last_loss"] = last["losses"][-1]
    if "peak_bytes" in last:
        found["peak_gb"] = last["peak_bytes"] / 1e9
    return found | versions


def timed(session: Session, workload: Workload) -> dict[str, Any]:
    """Rate, spread, MFU and peak memory of an engine's steps."""
    rounds, steps = (2, 2) if session.dry else (ROUNDS, STEPS)
    device = jax.devices()[0]
    before = (device.memory_stats() or {}).get("peak_bytes_in_use")
    last = 0.0
    for number in range(WARM):
        began = time.perf_counter()
        float(workload.step(number))
        last = time.perf_counter() - began
    steps = max(2, min(steps, round(SECONDS / rounds / last)))
    taken, times, losses = WARM, [], [0.0]
    for _ in range(rounds):
        seconds, losses = protocol.timed_steps(workload.step, taken, steps)
        times.append(seconds)
        taken += steps
    kind = device.device_kind
    found = rates(times, workload.tokens, workload.flops, device_kind=kind)
    found["last_loss"] = losses[-1]
    stats = device.memory_stats()
    if stats:
        found["peak_gb"] = stats["peak_bytes_in_use"] / 1e9
        found["peak_of_initialisation_gb"] = (before or 0) / 1e9
    return found


def rates(
    times: Iterable[float],
    tokens: int,
    flops_a_step: dict[str, float],
    *,
    device_kind: str | None,
) -> dict[str, Any]:
    """Tokens a second and MFU by both conventions; the median round counts.

    Args:
      times: seconds of a step, a round each.
      tokens: of a step.
      flops_a_step: by convention.
      device_kind: as JAX names it; None for "NVIDIA H200", whose peak rate of matmuls
        the H100 has too.
    """
    ordered = sorted(times)
    median = statistics.median(ordered)
    hardware = hardware_of(device_kind or "NVIDIA H200")
    found: dict[str, Any] = {
        "tokens_per_second": tokens / median,
        "slowest_round": tokens / ordered[-1],
        "fastest_round": tokens / ordered[0],
        "rounds": len(ordered),
        "step_ms": 1e3 * median,
    }
    if hardware is not None:
        for name, number in flops_a_step.items():
            rate = hardware.peak["bfloat16"]
            found[f"mfu_{name}"] = number / median / rate
        found["mfu_is"] = CONVENTION
    return found


def predicted_beside(session: Session, workload: Workload) -> dict[str, Any]:
    """The compiled step's peak and estimated time; its program is kept."""
    own = workload.engine
    compiled = own.lower().compile()
    text = compiled.as_text() or ""
    (session.keep / "step.hlo.txt").write_text(text, encoding="utf-8")
    module = parse(text)
    program = read_program(compiled, own.mesh, module)
    found: dict[str, Any] = {"predicted_peak_gb": program.memory.peak / 1e9}
    stats = jax.devices()[0].memory_stats()
    if stats:
        measured = stats["peak_bytes_in_use"]
        found["peak_error"] = program.memory.peak / measured - 1
    hardware = hardware_here(session)
    if hardware is not None:
        spec = own.loss().spec
        (traced,) = own.traces().values()
        work = Work(
            flops=flops(traced.jaxpr.eqns),
            model_flops=spec.model_flops,
            dtype=str(spec.precision.compute_dtype),
            traffic=memory_traffic(module),
            collectives=program.collectives,
            bubble=0.0,
            zero=0,
        )
        target = parse_target(f"{hardware.kind}:1x1")
        estimated = estimate(work, target, dict(own.mesh.shape))
        assert estimated is not None, "GPUs have rates"
        found["estimated_step_ms"] = 1e3 * estimated.step_seconds
        found["estimated_matmuls_ms"] = 1e3 * estimated.matmul_seconds
        found["estimated_memory_ms"] = 1e3 * estimated.memory_seconds
    return found


def require_torch(session: Session) -> None:
    """Skip the case if its interpreter has no torch."""
    done = subprocess.run(
        [session.torch_python, "-c", "import torch"],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:]
        raise NotHereError(
            f"{session.torch_python} can't import torch: {' '.join(last)}"
        )
