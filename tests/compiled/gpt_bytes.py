"""A two-layer cut of GPT-2 124M on one H200: what its compiled step's kernels do."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import optax

import jaxpar
from jaxpar.compiled.categories import Moved, moved_by_category
from jaxpar.compiled.hlo import parse
from jaxpar.mesh import MeshShape, make_mesh
from jaxpar.models import DecoderConfig, decoder_loss, make_decoder
from jaxpar.planner.absent_devices import gpu_devices

LENGTH, WIDTH, VOCAB, LAYERS = 1024, 768, 50_304, 2


@dataclasses.dataclass(frozen=True)
class Cut:
    """What is read of the program.

    Attributes:
      moved: launches and bytes by category.
      transposed: kernels whose result is the residual stream, or a hidden state of its
        shape, in another order than [B, T, D].
      fp32_logits: fp32 arrays of a row of logits or more that kernels write.
      norms: forward kernels of norms that write their result.
      wide: bytes of fp32 arrays of the residual stream's shape that kernels write.
    """

    moved: dict[str, Moved]
    transposed: int
    fp32_logits: int
    norms: int
    wide: int


def compile_cut(rows: int) -> Cut:
    """Compile the engine's step for one H200 that is not here, and read it."""
    config = DecoderConfig(
        vocab_size=VOCAB,
        seq_len=LENGTH,
        num_layers=LAYERS,
        num_heads=12,
        width=WIDTH,
        unroll=LAYERS,
    )
    engine = jaxpar.initialize(
        model=make_decoder(config),
        loss_fn=decoder_loss,
        optimizer=optax.adamw(1e-3),
        sample_batch={"tokens": jax.ShapeDtypeStruct((rows, LENGTH + 1), jnp.int32)},
        mesh=make_mesh(MeshShape(), gpu_devices("h200", 1, 1)),
        zero=0,
        precision="bf16",
    )
    text = engine.lower().compile().as_text()
    module = parse(text)
    kernels = [
        each
        for computation in module.computations.values()
        if not computation.name.startswith(("fused_", "wrapped_"))
        for each in computation.instructions.values()
        if each.opcode in ("fusion", "custom-call", "copy")
    ]
    shape = rows, LENGTH, WIDTH
    written = [(each, a) for each in kernels for a in each.types]
    hidden = [a for _, a in written if a.dims == shape]
    return Cut(
        moved=moved_by_category(module, VOCAB),
        transposed=sum(a.layout.split(":")[0] != "2,1,0" for a in hidden),
        fp32_logits=sum(
            a.dtype == "f32"
            and a.dims[-1:] == (VOCAB,)
            and math.prod(a.dims) > WIDTH * VOCAB
            for _, a in written
        ),
        norms=sum(
            "_norm/convert_element_type" in each.op_name
            and "transpose(" not in each.op_name
            for each in kernels
        ),
        wide=sum(a.bytes for a in hidden if a.dtype == "f32"),
    )
