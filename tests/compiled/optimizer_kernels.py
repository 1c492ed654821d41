"""Compile fused optimizers for an H200, in a process of its own, and say how.

    MOSAIC_GPU_DUMP_PTXAS=1 python -m tests.compiled.optimizer_kernels

Prints a line of JSON after what the assembler says of each configuration's kernels.
"""

import itertools
import json

from jaxpar.planner import absent_devices as deviceless

TILES = 4096
RULES = ("adamw", "lamb", "lion")
CONFIGURATIONS = list(itertools.product(RULES, (8, 32), ("bfloat16", "float32")))
"""Rule, bits of the moments, and dtype of the gradients."""


def main() -> None:
    deviceless.prepare_process()
    import jax  # noqa: PLC0415 - once the process is prepared
    import jax.numpy as jnp  # noqa: PLC0415
    import numpy as np  # noqa: PLC0415
    from jax.sharding import Mesh, NamedSharding, PartitionSpec  # noqa: PLC0415

    from kernels_pallas.fused_optimizers import (  # noqa: PLC0415
        TILE,
        AdamW,
        Leaves,
        Lion,
        Numbers,
        fused_update,
        init_moments,
    )

    rules = dict(zip(RULES, (AdamW(), AdamW(trust_ratio=True), Lion()), strict=True))
    mesh = Mesh(np.array(deviceless.gpu_devices("h200", 1, 1)[:1]), ("all",))
    whole = NamedSharding(mesh, PartitionSpec())
    leaves = Leaves(np.arange(TILES) // 7, -(-TILES // 7))

    def compiled(name: str, bits: int, dtype: str) -> dict[str, int]:
        rule = rules[name]

        def step(state, grads, count, rate, factor, applied):
            params, moments, copies = state
            numbers = Numbers(rate, count, factor, applied)
            options = {"copies": copies, "leaves": leaves, "decays": 0.1}
            new = fused_update(rule, params, grads, moments, numbers, **options)
            return new.params, new.moments, new.copies

        def shape(dims: tuple[int, ...], dtype: str) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(dims, jnp.dtype(dtype), sharding=whole)

        elements = (TILES * TILE,)
        moments = jax.eval_shape(lambda: init_moments(rule, elements[0], bits=bits))
        moments = jax.tree.map(lambda x: shape(x.shape, x.dtype), moments)
        state = shape(elements, "float32"), moments, shape(elements, "bfloat16")
        numbers = [shape((), kind) for kind in ("int32", "float32", "float32", "bool")]
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            traced = jax.jit(step, donate_argnums=0).trace(
                state, shape(elements, dtype), *numbers
            )
            program = traced.lower(lowering_platforms=("cuda",)).compile()
        text, memory = program.as_text(), program.memory_analysis()
        return {
            "kernels": text.count('custom_call_target="mosaic_gpu_v2"'),
            "scatters": text.count(" scatter("),
            "temporaries": memory.temp_size_in_bytes,
            "outputs": memory.output_size_in_bytes,
            "aliased": memory.alias_size_in_bytes,
        }

    for name, bits, dtype in CONFIGURATIONS:
        found = {"name": name, "bits": bits, "dtype": dtype}
        print(json.dumps({**found, **compiled(name, bits, dtype)}), flush=True)


if __name__ == "__main__":
    main()
