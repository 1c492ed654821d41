"""How fast does this GPU copy and multiply? Every roofline is a fraction of these."""

import importlib.metadata
import platform
import shutil
import subprocess
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.gpu.session import Rows, Session
from benchmarks.kernels.timing import copy_bandwidth, seconds
from jaxpar.compiled.hardware import hardware_of

ROUNDS = 20
WIDTHS = (4096, 8192, 16_384)
BESIDE = ("jaxlib", "flax", "optax", "torch", "triton", "jax-cuda13-plugin")
_QUERY = "name,driver_version,clocks.sm,clocks.mem,power.limit,temperature.gpu"


def measure(session: Session) -> Rows:
    """The machine, the bandwidth of a large copy, and the rate of square matmuls."""
    yield "machine", machine()
    elements = 1 << (20 if session.dry else 28)
    rounds = 2 if session.dry else ROUNDS
    hardware = hardware_of(jax.devices()[0].device_kind)
    bandwidth = copy_bandwidth(rounds, elements)
    found = {"gb_per_second": bandwidth / 1e9}
    if hardware is not None:
        found["achieved"] = bandwidth / hardware.memory_rate
    yield "copy", found
    for width in (128,) if session.dry else WIDTHS:
        rate = matmul_rate(width, rounds)
        found = {"tflops_per_second": rate / 1e12}
        if hardware is not None:
            found["achieved"] = rate / hardware.peak["bfloat16"]
        yield f"matmul {width}", found


def matmul_rate(width: int, rounds: int) -> float:
    """FLOP/s of a bf16 matmul of two square matrices of random numbers."""
    keys = jax.random.split(jax.random.key(0))
    a, b = (jax.random.normal(key, (width, width), jnp.bfloat16) for key in keys)
    return 2 * width**3 / seconds(lambda a, b: a @ b, (a, b), rounds)


def machine() -> dict[str, Any]:
    """What a number depends on besides the code."""
    found: dict[str, Any] = {
        "device_kind": jax.devices()[0].device_kind,
        "python": platform.python_version(),
        "jax": jax.__version__,
    }
    for name in BESIDE:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    if shutil.which("nvidia-smi"):
        command = ["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        found["nvidia_smi"] = done.stdout.strip()
    return found
