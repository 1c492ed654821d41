"""How long does a compiled call take on a GPU; what does it compile to without one?"""

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar.compiled.hlo import parse
from jaxpar.planner.absent_devices import gpu_devices
from jaxpar.planner.work import memory_traffic

IN_A_ROW = 10
"""Calls that are waited for together, so that the device is timed, not the host."""


def seconds(call: Callable[..., Any], args: tuple, rounds: int) -> float:
    """Median time of a call, of rounds of ten in a row; after three that don't count.

    Args:
      call: to be compiled; of few operands, which are soon dispatched.
      args: on the GPU.
      rounds: how many.
    """
    compiled = jax.jit(call)
    for _ in range(3):
        jax.block_until_ready(compiled(*args))
    times, out = [], None
    for _ in range(rounds):
        began = time.perf_counter()
        for _ in range(IN_A_ROW):
            out = compiled(*args)
        jax.block_until_ready(out)
        times.append((time.perf_counter() - began) / IN_A_ROW)
    return statistics.median(times)


def seconds_of_steps(
    step: Callable[[Any, Any], Any], state: Any, given: Any, rounds: int
) -> float:
    """Median time of ``state = step(state, given)``, whose state is donated.

    Ten steps are one program: a state of many leaves takes the host longer to hand
    over than the GPU to step.
    """
    compiled = jax.jit(several(step), donate_argnums=0)
    for _ in range(3):
        state = jax.block_until_ready(compiled(state, given))
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        state = jax.block_until_ready(compiled(state, given))
        times.append((time.perf_counter() - began) / IN_A_ROW)
    return statistics.median(times)


def several(step: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Ten steps in a loop."""

    def one(_: jax.Array, state: Any, given: Any) -> Any:
        # Else what depends on `given` alone, such as its norm, would leave the loop.
        return step(*jax.lax.optimization_barrier((state, given)))

    def run(state: Any, given: Any) -> Any:
        body = functools.partial(one, given=given)
        return jax.lax.fori_loop(0, IN_A_ROW, body, state)

    return run


def copy_bandwidth(rounds: int, elements: int = 1 << 28) -> float:
    """Bytes a second, read and written, of elements in fp32: a gigabyte."""
    x = jax.random.normal(jax.random.key(0), (elements,), jnp.float32)
    return 2 * x.nbytes / seconds(lambda x: x + 1.0, (x,), rounds)


def compile_for_h200(
    call: Callable[..., Any],
    args: tuple,
    donated: tuple[int, ...] = (),
    options: dict[str, Any] | None = None,
) -> dict[str, float]:
    """Compile a call for a GPU that is not here.

    Args:
      call: the call.
      args: shapes and dtypes.
      donated: numbers of the arguments that it may take over.
      options: of the compiler.

    Returns:
      The time it took, the kernels that the program launches, the megabytes of its
      temporaries and of its copies of whole arrays, and the gigabytes that its kernels
      read and write.
    """
    mesh = Mesh(np.array(gpu_devices("h200", 1, 1)[:1]), ("all",))
    whole = NamedSharding(mesh, P())
    placed = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole), args
    )
    began = time.perf_counter()
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        traced = jax.jit(call, donate_argnums=donated).trace(*placed)
        compiled = traced.lower(lowering_platforms=("cuda",)).compile(options)
    memory, text = compiled.memory_analysis(), compiled.as_text()
    assert memory is not None
    assert text is not None
    entry = text[text.rindex("\nENTRY") :]
    launches = (" fusion(", " custom-call(", " copy(", " copy-start(")
    traffic = memory_traffic(parse(text))
    return {
        "compiled_in_seconds": time.perf_counter() - began,
        "launches": sum(entry.count(word) for word in launches),
        "copies": entry.count(" copy("),
        "temporaries_mb": memory.temp_size_in_bytes / 1e6,
        "moved_gb": (traffic.products + traffic.others) / 1e9,
    }
