"""What is compiled of pipelines: training steps of a GPT cut into stages, on H200s."""

import dataclasses
import re
import time

import jax
import jax.numpy as jnp
import optax

import jaxpar
from jaxpar.compiled.program import CompiledProgram, read_program
from jaxpar.mesh import MeshShape, make_mesh
from jaxpar.models import DecoderConfig, decoder_loss, make_decoder
from jaxpar.planner.absent_devices import gpu_devices
from jaxpar.tree import named_leaves, num_elements
from tests.memory import most_bytes


@dataclasses.dataclass(frozen=True)
class Pipe:
    """A pipelined step, in bf16 with AdamW; one row a micro-batch and data shard."""

    schedule: str = "1f1b"
    microbatches: int = 8
    data: int = 2
    pipe: int = 4
    tensor: int = 2
    zero: int = 1
    layers: int = 8
    width: int = 256
    vocab: int = 1024
    length: int = 192
    heads: int = 4
    remat: str = "full"

    @property
    def activation_bytes(self) -> int:
        """Of one micro-batch between two blocks."""
        return self.length * self.width * 2


@dataclasses.dataclass(frozen=True)
class CompiledPipe:
    """What the compiler made of it.

    Attributes:
      psi: parameters; those of blocks apart.
      program: the compiled step, read.
      buffers: [places] of every array of activations that the loop carries.
      stashes: likewise, of what a stage's blocks keep between forward and backward, or
        between the halves of a backward.
      seconds: wall-clock time of lowering and compiling.
      host_bytes: the most memory that the process has had.
    """

    psi: int
    psi_blocks: int
    program: CompiledProgram
    buffers: tuple[int, ...]
    stashes: tuple[int, ...]
    seconds: float
    host_bytes: int


def compile_pipe(run: Pipe) -> CompiledPipe:
    """Make the engine on GPUs that are not here, and compile its step."""
    gpus = run.data * run.pipe * run.tensor
    devices = gpu_devices("h200", max(1, gpus // 8), min(8, gpus))
    mesh = make_mesh(MeshShape(run.data, run.pipe, run.tensor), devices)
    config = DecoderConfig(
        num_layers=run.layers,
        num_heads=run.heads,
        width=run.width,
        seq_len=run.length,
        vocab_size=run.vocab,
        remat=run.remat,
    )
    shape = (run.data * run.microbatches, run.length + 1)
    began = time.perf_counter()
    engine = jaxpar.initialize(
        model=make_decoder(config),
        loss_fn=decoder_loss,
        optimizer=optax.adamw(1e-3),
        sample_batch={"tokens": jax.ShapeDtypeStruct(shape, jnp.int32)},
        mesh=mesh,
        zero=run.zero,
        precision="bf16",
        accumulate=run.microbatches,
        schedule=run.schedule,
    )
    compiled = engine.lower().compile()
    seconds = time.perf_counter() - began
    params = named_leaves(engine.state.params)
    buffer = rf"bf16\[1,(\d+),1,{run.length},{run.width}\]"
    blocks = run.layers // run.pipe
    stash = rf"bf16\[1,(\d+),{blocks},(?:1,)?{run.length},[\d,]+\]"
    loops = re.findall(r" = \((.*)\) while\(", compiled.as_text())
    ticks = max(loops, key=lambda loop: len(re.findall(buffer, loop)))
    buffers, stashes = (
        tuple(sorted(map(int, re.findall(kind, ticks)))) for kind in (buffer, stash)
    )
    return CompiledPipe(
        psi=num_elements(engine.state.params),
        psi_blocks=sum(x.size for k, x in params.items() if k.startswith("blocks/")),
        program=read_program(compiled, mesh),
        buffers=buffers,
        stashes=stashes,
        seconds=seconds,
        host_bytes=most_bytes(),
    )
