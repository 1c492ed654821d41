"""Compile block-sparse attention for an H200, in a process of its own, and say how.

    MOSAIC_GPU_DUMP_PTXAS=1 python -m tests.compiled.kernels [limits]

Prints a line of JSON after what the assembler says of each configuration's kernels.
"""

import dataclasses
import json
import sys
import warnings

import numpy as np

from jaxpar.planner import absent_devices as deviceless
from kernels_pallas.block_sparse_attention import (
    BlockLayout,
    Tile,
    TileWork,
    make_tile_work,
)

SEQ_LEN, HEADS, KV_HEADS = 4096, 4, 2


@dataclasses.dataclass(frozen=True)
class Configuration:
    """What kernels are compiled for."""

    size: int
    block: int
    longest: int | None = None
    limits: bool = False
    deterministic: bool = True


CONFIGURATIONS = (
    Configuration(64, 128),
    Configuration(128, 128),
    Configuration(64, 16),
    Configuration(128, 16),
    Configuration(128, 128, longest=4),
    Configuration(64, 128, limits=True),
    Configuration(64, 16, limits=True),
    Configuration(128, 64, limits=True),
    Configuration(128, 128, deterministic=False),
    Configuration(128, 64, limits=True, deterministic=False),
    Configuration(128, 16, deterministic=False),
)


def compiled(config: Configuration) -> dict[str, int]:
    """Compile forward and backward pass; once the process is prepared."""
    import jax  # noqa: PLC0415
    import jax.numpy as jnp  # noqa: PLC0415
    from jax.sharding import Mesh, NamedSharding, PartitionSpec  # noqa: PLC0415

    from kernels_pallas.block_sparse_attention import (  # noqa: PLC0415
        block_sparse_attention,
    )

    mesh = Mesh(np.array(deviceless.gpu_devices("h200", 1, 1)[:1]), ("all",))
    whole = NamedSharding(mesh, PartitionSpec())
    work = work_of(config)

    def shape(heads: int) -> jax.ShapeDtypeStruct:
        dims = (1, SEQ_LEN, heads, config.size)
        return jax.ShapeDtypeStruct(dims, jnp.bfloat16, sharding=whole)

    def pull(q, k, v, do, ids, lens):
        options = {"segment_ids": ids, "kv_seq_lens": lens} if config.limits else {}
        options |= {"deterministic": config.deterministic, "implementation": "mosaic"}

        def attend(q, k, v):
            return block_sparse_attention(q, k, v, work, **options)

        return jax.vjp(attend, q, k, v)[1](do)

    q, k = shape(HEADS), shape(KV_HEADS)
    ids = jax.ShapeDtypeStruct((1, SEQ_LEN), jnp.int32, sharding=whole)
    lens = jax.ShapeDtypeStruct((1,), jnp.int32, sharding=whole)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        traced = jax.jit(pull).trace(q, k, k, q, ids, lens)
        lowered = traced.lower(lowering_platforms=("cuda",))
    program = lowered.compile()
    text = program.as_text()
    return {
        "kernels": text.count('custom_call_target="mosaic_gpu_v2"'),
        "copies": text.count(" copy("),
        "parts": parts_of(work),
        "temporaries": program.memory_analysis().temp_size_in_bytes,
    }


def work_of(config: Configuration) -> TileWork:
    """A fifth of the past's blocks, and each token's own."""
    num_blocks = SEQ_LEN // config.block
    blocks = np.random.default_rng(0).random((num_blocks, num_blocks)) < 0.2
    layout = BlockLayout(blocks | np.eye(num_blocks, dtype=bool), config.block)
    options = {"tile": Tile(128, 128), "longest": config.longest}
    return make_tile_work(layout, SEQ_LEN, SEQ_LEN, causal=True, **options)


def parts_of(work: TileWork) -> int:
    """Partial results of queries, keys and values, of all heads."""
    from kernels_pallas.block_sparse_attention.mosaic.device_lists import (  # noqa: PLC0415
        group_columns,
    )

    columns = group_columns(work, HEADS // KV_HEADS, KV_HEADS)
    return HEADS * work.rows.num_parts + 2 * KV_HEADS * columns.num_parts


def main() -> None:
    deviceless.prepare_process()
    warnings.simplefilter("ignore", UserWarning)  # Of coarse tiles.
    only_limits = "limits" in sys.argv[1:]
    for config in CONFIGURATIONS:
        if only_limits and not config.limits:
            continue
        found = compiled(config)
        print(json.dumps({**dataclasses.asdict(config), **found}), flush=True)


if __name__ == "__main__":
    main()
