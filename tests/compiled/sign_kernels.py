"""Compile a 1-bit exchange for H200s, in a process of its own, and say how.

    MOSAIC_GPU_DUMP_PTXAS=1 python -m tests.compiled.sign_kernels

Prints a line of JSON after what the assembler says of each exchange's kernels.
"""

import json

from jaxpar.planner import absent_devices as deviceless

SIZE = 1 << 20
WORKERS = (2, 16)


def main() -> None:
    deviceless.prepare_process()
    import jax  # noqa: PLC0415 - once the process is prepared
    import jax.numpy as jnp  # noqa: PLC0415
    from jax.sharding import NamedSharding  # noqa: PLC0415
    from jax.sharding import PartitionSpec as P  # noqa: PLC0415

    from jaxpar.mesh import MeshShape, make_mesh  # noqa: PLC0415
    from jaxpar.optim.sign_exchange import SignExchange, SignPiece  # noqa: PLC0415
    from jaxpar.sharding.leaf_sharding import LeafSharding  # noqa: PLC0415

    def compiled(workers: int) -> dict[str, int]:
        devices = deviceless.gpu_devices("h200", -(-workers // 8), min(workers, 8))
        mesh = make_mesh(MeshShape(data=workers), devices)
        sizes = {"data": workers, "pipe": 1, "tensor": 1}
        leaf = LeafSharding("w", (SIZE,), (None,), None, ((),), sizes, "")
        piece = SignPiece(leaf, workers)
        exchange = SignExchange([piece], ("data",))

        def on_device(x, momentum, worker, server):
            own = [[x[0]], [momentum != 0], [worker[0]], [server[0]]]
            return [found[0][None] for found in exchange(*own)]

        def shape(dims: tuple[int, ...], spec: P) -> jax.ShapeDtypeStruct:
            place = NamedSharding(mesh, spec)
            return jax.ShapeDtypeStruct(dims, jnp.float32, sharding=place)

        split, size = P("data"), (workers, SIZE)
        step = jax.shard_map(
            on_device,
            mesh=mesh,
            in_specs=(split, P(), split, split),
            out_specs=split,
            check_vma=False,
        )
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            traced = jax.jit(step, donate_argnums=(2, 3)).trace(
                shape(size, split),
                shape((SIZE,), P()),
                shape(size, split),
                shape((workers, piece.chunk), split),
            )
            program = traced.lower(lowering_platforms=("cuda",)).compile()
        text = program.as_text()
        return {
            "kernels": text.count('custom_call_target="mosaic_gpu_v2"'),
            "copies": text.count(f"f32[1,{SIZE}]{{1,0}} copy("),
            "temporaries": program.memory_analysis().temp_size_in_bytes,
        }

    for workers in WORKERS:
        found = {"workers": workers, **compiled(workers)}
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
