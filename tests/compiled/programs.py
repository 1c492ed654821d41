"""What is compiled: training steps and known programs, for devices that are not here.

Runs in the process that has the compilers; arguments and results travel as pickles.
"""

import contextlib
import dataclasses
import functools
import math
import re
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from optax.contrib import MuonDimensionNumbers

import jaxpar
from jaxpar.compiled.budget import Budget
from jaxpar.compiled.program import CompiledProgram, read_program
from jaxpar.mesh import (
    DATA,
    TENSOR,
    MeshShape,
    lowering_platform,
    make_mesh,
    num_batch_shards,
)
from jaxpar.models import decoder_loss, make_decoder
from jaxpar.models.decoder import model as gpt
from jaxpar.models.decoder.config import DecoderConfig
from jaxpar.optim import fused_adamw, fused_lamb
from jaxpar.planner.absent_devices import gpu_devices, tpu_devices
from jaxpar.sharding import collectives as collectives
from jaxpar.sharding import zero
from jaxpar.step.gathered_leaf import GatheredAtUse
from jaxpar.tree import num_elements


def matrices(params: Any) -> Any:
    """Which leaves Muon takes: the kernels of layers, stacked or not."""
    return jax.tree_util.tree_map_with_path(
        lambda path, x: (
            MuonDimensionNumbers(x.ndim - 2, x.ndim - 1)
            if path[-1].key == "kernel"
            else None
        ),
        params,
    )


OPTIMIZERS: dict[str, Any] = {
    "adamw": optax.adamw(1e-3),
    "muon": optax.contrib.muon(1e-3, muon_weight_dimension_numbers=matrices),
    "fused": fused_adamw(1e-3),
    "fused 8 bits": fused_adamw(1e-3, bits=8),
    "fused lamb": fused_lamb(1e-3),
}


@dataclasses.dataclass(frozen=True)
class Run:
    """A GPT's training step on H200s, or a slice of TPUs, in bf16 with AdamW."""

    hosts: int = 8
    tpus: str = ""
    tensor: int = 1
    replica: int = 1
    zero: int = 1
    accumulate: int = 1
    rows: int = 1
    two_batches: bool | None = None
    layers: int = 8
    width: int = 1024
    vocab: int = 8192
    length: int = 256
    remat: str = "full"
    sequence_parallel: bool = False
    users_model: bool = False
    rank: int = 0
    coupled: bool = False
    optimizer: str = "adamw"
    fault: str = ""


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What the compiler made of it.

    Attributes:
      psi: parameters that are trained.
      frozen: the others.
      num_devices: GPUs.
      data: GPUs on the data axis.
      program: the compiled step, read.
      copied: bytes that it copies on a device as they are, outside of loops.
      kernels: calls of Mosaic kernels.
      seconds: processor time that lowering and compiling took.
    """

    psi: int
    frozen: int
    num_devices: int
    data: int
    program: CompiledProgram
    copied: int
    kernels: int
    seconds: float


class Perceptron(nnx.Module):
    """A user's model: nothing of jaxpar in it, and no scan.

    With a rank, its kernels are kept in bf16 and have adapters.
    """

    def __init__(self, layers: int, width: int, rank: int, rngs: nnx.Rngs):
        def layer() -> nnx.Module:
            if not rank:
                return nnx.Linear(width, width, rngs=rngs)
            bf16 = {"param_dtype": jnp.bfloat16, "use_bias": False}
            base = nnx.Linear(width, width, rngs=rngs, **bf16)
            return nnx.LoRA(width, rank, width, base_module=base, rngs=rngs)

        self.layers = nnx.List([layer() for _ in range(layers)])

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = x + jax.nn.gelu(layer(x))
        return x


def squared(model: Any, batch: jax.Array) -> jax.Array:
    return jnp.mean(model(batch).astype(jnp.float32) ** 2)


def compile_step(run: Run) -> Compiled:
    """Make the engine on GPUs that are not here, and compile its step."""
    arguments = arguments_of(run)
    began = time.process_time()
    with _FAULTS[run.fault]():
        engine = jaxpar.initialize(**arguments)
        compiled = engine.lower().compile()
    return Compiled(
        psi=num_elements(engine.state.params),
        frozen=num_elements(engine.state.frozen),
        num_devices=engine.mesh.size,
        data=engine.mesh.shape[DATA],
        program=read_program(compiled, engine.mesh),
        copied=_copied(compiled.as_text()),
        kernels=compiled.as_text().count('custom_call_target="mosaic_gpu'),
        seconds=time.process_time() - began,
    )


def _copied(text: str) -> int:
    """Bytes that a program's entry copies on a device."""
    entry = text[text.rindex("\nENTRY") :]
    found = re.findall(r" = (\w+)\[([\d,]*)\][^ ]* copy\(", entry)
    sizes = {"pred": 1, "bf16": 2, "f32": 4, "s32": 4, "u32": 4, "s8": 1, "u8": 1}
    return sum(
        sizes[dtype] * math.prod(map(int, filter(None, dims.split(","))))
        for dtype, dims in found
    )


def plan_notes(run: Run) -> tuple[str, ...]:
    """What a plan of the step for its devices remarks."""
    engine = jaxpar.initialize(**arguments_of(run))
    return jaxpar.plan(engine, f"h200:{run.hosts}x8").notes


def verify(run: Run) -> tuple[int, Budget | None, tuple[str, ...]]:
    """Verify the step: its parameters, what it moves, or what exceeds the budget."""
    arguments = arguments_of(run)
    with _FAULTS[run.fault]():
        engine = jaxpar.initialize(**arguments)
        psi = num_elements(engine.state.params)
        try:
            return psi, engine.verify(), ()
        except jaxpar.BudgetExceeded as error:
            return psi, None, error.violations


def arguments_of(run: Run) -> dict[str, Any]:
    """What the engine on devices that are not here is made of."""
    devices = tpu_devices(run.tpus) if run.tpus else gpu_devices("h200", run.hosts, 8)
    shape = MeshShape(data=-1, tensor=run.tensor, replica=run.replica)
    mesh = make_mesh(shape, devices)
    rows = num_batch_shards(mesh) * run.accumulate * run.rows
    if run.users_model:
        model: Any = functools.partial(Perceptron, run.layers, run.width, run.rank)
        loss_fn: Any = squared
        batch: Any = jax.ShapeDtypeStruct((rows, run.width), jnp.bfloat16)
    else:
        config = DecoderConfig(
            num_layers=run.layers,
            num_heads=run.width // 64,
            width=run.width,
            seq_len=run.length,
            vocab_size=run.vocab,
            remat=run.remat,
            sequence_parallel=run.sequence_parallel,
        )
        model = make_decoder(config)
        loss_fn = decoder_loss
        batch = {"tokens": jax.ShapeDtypeStruct((rows, run.length + 1), jnp.int32)}
    return {
        "model": model,
        "loss_fn": loss_fn,
        "optimizer": OPTIMIZERS[run.optimizer],
        "sample_batch": batch,
        "mesh": mesh,
        "zero": run.zero,
        "precision": "bf16",
        "accumulate": run.accumulate,
        "coupled_batch": run.coupled,
        "two_batch_overlap": run.two_batches,
        "trainable": nnx.LoRAParam if run.rank else None,
    }


@contextlib.contextmanager
def _constraint_dropped() -> Iterator[None]:
    """Gradients without the placement that their leaves were computed on."""
    with mock.patch.object(
        collectives, "_as_made", lambda plan, grad: grad.reshape(plan.view_shape)
    ):
        yield


@contextlib.contextmanager
def _accumulator_replicated() -> Iterator[None]:
    """Stage 2 that adds whole gradients up and reduces them once."""
    stages = list(zero.ZERO_STAGES)
    stages[2] = dataclasses.replace(stages[2], reduce="step")
    with mock.patch.object(zero, "ZERO_STAGES", tuple(stages)):
        yield


@contextlib.contextmanager
def _cast_after_gather() -> Iterator[None]:
    """Parameters gathered in fp32."""

    def gathered(self: GatheredAtUse, source: jax.Array) -> jax.Array:
        whole = self.gathering.collectives.gather(self.leaf_sharding, source)
        # Without a barrier XLA casts most of them before it gathers.
        return jax.lax.optimization_barrier(whole).astype(self.dtype)

    with mock.patch.object(GatheredAtUse, "gathered", gathered):
        yield


@contextlib.contextmanager
def _data_left_out_in_block() -> Iterator[None]:
    """A block that says how its hidden layer lies over tensor, and not over data."""

    def constrain(x: jax.Array, *axes: Any) -> jax.Array:
        return jaxpar.constrain(x, *(None if a == DATA else a for a in axes))

    with mock.patch.object(gpt, "constrain", constrain):
        yield


@contextlib.contextmanager
def _left_as_scattered() -> Iterator[None]:
    """Gradients in memory as NCCL leaves them."""
    with mock.patch.object(collectives.ManualCollectives, "_as_kept", lambda _, x: x):
        yield


_FAULTS: dict[str, Any] = {
    "": contextlib.nullcontext,
    "constraint dropped": _constraint_dropped,
    "accumulator replicated": _accumulator_replicated,
    "cast after the gather": _cast_after_gather,
    "left as scattered": _left_as_scattered,
    "data left out in a block": _data_left_out_in_block,
}


def calls_refused() -> dict[str, str]:
    """What an engine on GPUs that are not here says to calls that run something."""
    mesh = make_mesh(MeshShape(data=-1), gpu_devices("h200", 1, 8))
    engine = jaxpar.initialize(
        model=lambda rngs: nnx.Linear(4, 4, rngs=rngs),
        loss_fn=squared,
        optimizer=optax.sgd(0.1),
        sample_batch=jax.ShapeDtypeStruct((8, 4), jnp.float32),
        mesh=mesh,
    )
    batch = jnp.ones((8, 4))
    calls = {
        "step": lambda: engine.step(batch),
        "evaluate": lambda: engine.evaluate(batch),
        "save": lambda: engine.save("never-made"),
        "restore": lambda: engine.restore("never-made"),
        "model": engine.model,
    }
    said = {"explain": engine.explain().details}
    for name, call in calls.items():
        try:
            call()
        except RuntimeError as error:
            said[name] = str(error)
    return said


LAYERS, WIDTH, ROWS = 3, 2048, 256
"""Of the known program."""


def _known(x: jax.Array, kernels: jax.Array, y: jax.Array) -> tuple:
    """Every kind of collective, of known bytes, in and out of a loop."""

    def layer(x: jax.Array, kernel: jax.Array) -> tuple[jax.Array, None]:
        whole = jax.lax.all_gather(kernel, DATA, axis=0, tiled=True)
        return jax.lax.psum(
            jnp.tanh(jnp.dot(x, whole, precision="highest")), TENSOR
        ), None

    x, _ = jax.lax.scan(layer, x, kernels)
    scattered = jax.lax.psum_scatter(x, DATA, scatter_dimension=1, tiled=True)
    turned = jax.lax.ppermute(x, TENSOR, [(0, 1), (1, 0)])
    swapped = jax.lax.all_to_all(y, DATA, 0, 0, tiled=True)
    total = jax.lax.psum(x.sum(), (DATA, TENSOR))
    return scattered, turned, swapped, total


def read_known(platform: str) -> CompiledProgram:
    """Compile the known program for 4 x 2 devices of a platform, and read it."""
    devices = {
        "cpu": lambda: jax.devices()[:8],
        "gpu": lambda: gpu_devices("h200", 1, 8),
        "tpu": lambda: tpu_devices("v5e:2x4"),
    }[platform]()
    mesh = Mesh(
        np.array(devices).reshape(4, 1, 2),
        (DATA, "pipe", TENSOR),
        axis_types=(jax.sharding.AxisType.Auto,) * 3,
    )
    program = jax.jit(
        jax.shard_map(
            _known,
            mesh=mesh,
            in_specs=(P(), P(None, DATA), P()),
            out_specs=(P(None, DATA), P(TENSOR), P(DATA), P()),
            check_vma=False,
        )
    )

    def struct(shape: tuple[int, ...], spec: P, dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    traced = program.trace(
        struct((ROWS, WIDTH), P(), jnp.float32),
        struct((LAYERS, WIDTH, WIDTH), P(None, DATA), jnp.float32),
        struct((8, WIDTH), P(), jnp.bfloat16),
    )
    lowered = traced.lower(lowering_platforms=(lowering_platform(mesh),))
    return read_program(lowered.compile(), mesh)
