"""Which options is the step compiled with, and why: the one table of them.

Options are passed with the compilation (`jax.jit`'s ``compiler_options``), never
through ``XLA_FLAGS``: two engines in a process may differ. An option is in the table
only if a measurement justifies it.
"""

import dataclasses
import math
from collections.abc import Mapping

from jax.sharding import Mesh

from jaxpar.mesh import REPLICA, ZERO_AXES, are_present

Value = bool | int | float | str

BUCKET_BYTES = 32 << 20
"""Gradients in one reduce-scatter, in bytes of unsharded gradients."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """One option of the compiler.

    Attributes:
      option: XLA's name.
      value: what it is set to.
      why: the justification.
    """

    option: str
    value: Value
    why: str


def choose_settings(
    mesh: Mesh,
    overrides: Mapping[str, Value | None] | None = None,
    layer_bytes: int = 0,
    *,
    in_halves: bool = False,
) -> tuple[Setting, ...]:
    """Choose the options that a step for this mesh is compiled with.

    Args:
      mesh: the mesh; the platform of its devices selects the options.
      overrides: option -> value, replacing the table's; None for XLA's own default.
      layer_bytes: of the largest layer that a loop gathers ahead, unsharded over data.
      in_halves: whether halves of a device's rows are computed side by side.

    Returns:
      The settings.

    Example:
      >>> from jaxpar.mesh import MeshShape, make_mesh
      >>> chosen = choose_settings(make_mesh(MeshShape()), {"xla_cpu_max_isa": "AVX2"})
      >>> chosen[-1].option, chosen[-1].value
      ('xla_cpu_max_isa', 'AVX2')
    """
    platform = mesh.devices.flat[0].platform
    chosen = {}
    if platform == "gpu":
        settings = _for_gpus(mesh, layer_bytes, in_halves=in_halves)
        chosen = {setting.option: setting for setting in settings}
    if platform == "cpu" and mesh.size > 1:
        chosen = {_IN_ORDER.option: _IN_ORDER}
    for option, value in (overrides or {}).items():
        if value is None:
            chosen.pop(option, None)
        else:
            chosen[option] = Setting(option, value, "given as xla_options")
    return tuple(chosen.values())


def compiler_options(settings: tuple[Setting, ...]) -> dict[str, Value]:
    """The settings as `jax.jit` takes them."""
    return {setting.option: setting.value for setting in settings}


def options_of_all(mesh: Mesh) -> dict[str, Value]:
    """The options of every program with collectives, such as an evaluation."""
    settings = choose_settings(mesh)
    return compiler_options(tuple(own for own in settings if own is _IN_ORDER))


def _for_gpus(mesh: Mesh, layer_bytes: int, *, in_halves: bool) -> tuple[Setting, ...]:
    chosen = [] if are_present(mesh) else [_MOCKED]
    data = math.prod(mesh.shape.get(axis, 1) for axis in ZERO_AXES)
    if data > 1:
        chosen.append(_bucket(data, layer_bytes))
    if data > 1 and layer_bytes:
        chosen += _ahead(layer_bytes)
    if data > 1 and layer_bytes and mesh.shape.get(REPLICA, 1) > 1:
        chosen.append(_BESIDE_REPLICAS)
    elif data > 1 and in_halves:
        chosen.append(_BESIDE_HALVES)
    if in_halves:
        chosen.append(_APART)
    return tuple(chosen)


def _ahead(layer_bytes: int) -> tuple[Setting, ...]:
    """For loops that gather a layer ahead (`jaxpar.jaxprs.layer_loop`)."""
    one_collective = Setting(
        "xla_gpu_all_gather_combine_threshold_bytes",
        layer_bytes,
        "a layer's parameters are gathered by one collective",
    )
    two_buffers = Setting(
        "xla_gpu_enable_while_loop_double_buffering",
        True,
        "the layer that is gathered and the one that computes change places every "
        "iteration; otherwise each is copied, 14 ms of a 7B step",
    )
    return one_collective, two_buffers


_AT_ONCE = "xla_gpu_experimental_parallel_collective_overlap_limit"

_BESIDE_REPLICAS = Setting(
    _AT_ONCE,
    4,
    "a layer's gather, another's reduce-scatter, and the all-reduce between replicas "
    "run beside each other; one at a time, what XLA expects to be long leaves the "
    "others nothing to hide under (7B, 512 GPUs in 64 replicas, ZeRO 3: 38 ms exposed "
    "with 2, 16 with 4). Without replicas one at a time is better",
)

_BESIDE_HALVES = Setting(
    _AT_ONCE,
    2,
    "a half's sums over tensor run beside a layer's gather over data (7B, 64 GPUs, "
    "tensor 4: 64 ms exposed one at a time, 20 with 2, 23 with 4)",
)

_APART = Setting(
    "xla_gpu_all_reduce_combine_threshold_bytes",
    1 << 20,
    "XLA would merge the sums of both halves into one, for which both wait",
)

_IN_ORDER = Setting(
    "xla_cpu_scheduler_type",
    "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED",
    "XLA's default order lets CPU devices start a collective while others still run: a "
    "GPT at ZeRO 3 on two devices had a NaN, or another loss, in its first steps, or "
    "was aborted (jax 0.11.2; benchmarks/cpu_order.py: as fast, and right)",
)

_MOCKED = Setting(
    "xla_gpu_mock_custom_calls",
    True,
    "a program that is compiled and never run may contain calls that only a present "
    "GPU could fill in (jaxpar/models/attention_placeholder.py)",
)


def _bucket(data: int, layer_bytes: int) -> Setting:
    return Setting(
        "xla_gpu_reduce_scatter_combine_threshold_bytes",
        max(1, max(BUCKET_BYTES, layer_bytes) // data),
        "XLA counts the bytes that stay on a device, so its default merges "
        f"{data} times as many bytes of gradients; those of unscanned layers would "
        "all be alive at the peak (benchmarks/compiled_gpu.py: 2.0 bytes of "
        "temporaries per parameter by default, 1.1 with this setting)",
    )
