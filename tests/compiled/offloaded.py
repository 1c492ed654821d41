"""What is compiled: a GPT's step with its state in host memory, or without.

Runs in the process that has the compilers; arguments and results travel as pickles.
"""

import dataclasses
import math
import re

import jax
import jax.numpy as jnp
import optax

import jaxpar
from jaxpar.models import DecoderConfig, decoder_loss, make_decoder
from jaxpar.planner.targets import parse_target
from jaxpar.tree import num_elements

PIECE_MB = 2.0
LAYERS, WIDTH, VOCAB, LENGTH = 8, 512, 8192, 256


@dataclasses.dataclass(frozen=True)
class OffloadedStep:
    """A compiled step.

    Attributes:
      psi: parameters.
      state: bytes of the state on a device.
      on_host: bytes of the host's memory that its arguments take, for a device.
      temporaries: bytes on a device.
      copied_whole: sizes of arrays in host memory that the program copies.
      reads: copies of pieces to the device, started and awaited apart.
      writes: those to the host.
      beside: of the kernels in the loops over pieces, those between the start of a copy
        and its end.
    """

    psi: int
    state: int
    on_host: int
    temporaries: int
    copied_whole: tuple[int, ...]
    reads: int
    writes: int
    beside: int


def _engine(target: str, zero: int, offload: jaxpar.Offload | None) -> jaxpar.Engine:
    """The engine on a target's devices."""
    devices = parse_target(target).devices()
    config = DecoderConfig(
        num_layers=LAYERS,
        num_heads=8,
        width=WIDTH,
        seq_len=LENGTH,
        vocab_size=VOCAB,
        remat="full",
    )
    return jaxpar.initialize(
        model=make_decoder(config),
        loss_fn=decoder_loss,
        optimizer=optax.adamw(1e-3),
        sample_batch={
            "tokens": jax.ShapeDtypeStruct((len(devices), LENGTH + 1), jnp.int32)
        },
        mesh=jaxpar.make_mesh(jaxpar.MeshShape(), devices),
        zero=zero,
        precision="bf16",
        clip_norm=1.0,
        offload=offload,
    )


def compile_step(target: str, zero: int, offloads: bool) -> OffloadedStep:
    """Compile the step for a target's devices."""
    offload = jaxpar.Offload(piece_mb=PIECE_MB) if offloads else None
    engine = _engine(target, zero, offload)
    compiled = engine.lower().compile()
    stats, text = compiled.memory_analysis(), compiled.as_text()
    return OffloadedStep(
        psi=num_elements(engine.placement.abstract.params),
        state=stats.argument_size_in_bytes,
        on_host=stats.host_argument_size_in_bytes,
        temporaries=stats.temp_size_in_bytes,
        copied_whole=_copied_whole(text),
        reads=len(re.findall(r"dynamic-slice-start\S* = [^\n]*S\(5\)", text)),
        writes=len(re.findall(r"dynamic-update-slice-start\S* = [^\n]*S\(5\)", text)),
        beside=_kernels_beside(text),
    )


@dataclasses.dataclass(frozen=True)
class HostComputedStep:
    """The two programs of a step whose update the host computes.

    Attributes:
      psi: parameters.
      sent: bytes that the first one's results take in the host's memory.
      held: bytes of the host's memory that the second one's arguments take.
      aliased: of them, those that its results take over.
      copied: names of the second one's instructions that copy to or from the host.
      early: copies of a layer's gradients in the first one, started and awaited apart.
      copied_whole: sizes of arrays in host memory that the first one copies.
      temporaries: of the first one, bytes on a device.
    """

    psi: int
    sent: int
    held: int
    aliased: int
    copied: tuple[str, ...]
    early: int
    copied_whole: tuple[int, ...]
    temporaries: int


def compile_host_computed(target: str, zero: int) -> HostComputedStep:
    """Compile both programs for a target's devices."""
    engine = _engine(target, zero, jaxpar.Offload(update="host"))
    gradients, update = (
        engine.lower(part).compile() for part in ("gradients", "update")
    )
    first, second = gradients.memory_analysis(), update.memory_analysis()
    text, before = update.as_text(), gradients.as_text()
    return HostComputedStep(
        psi=num_elements(engine.placement.abstract.params),
        sent=first.host_output_size_in_bytes,
        held=second.host_argument_size_in_bytes,
        aliased=second.host_alias_size_in_bytes,
        copied=tuple(re.findall(r"%(\S*copy\S*) = [^\n]*S\(5\)", text)),
        early=len(re.findall(r"update-slice-start\S* = [^\n]*S\(5\)", before)),
        copied_whole=_copied_whole(before),
        temporaries=first.temp_size_in_bytes,
    )


def _copied_whole(text: str) -> tuple[int, ...]:
    """Elements of arrays in host memory that are copied to host memory."""
    found = re.findall(r"= \w+\[([\d,]*)\]\{[^}]*S\(5\)\} copy\(", text)
    return tuple(math.prod(map(int, filter(None, dims.split(",")))) for dims in found)


def _kernels_beside(text: str) -> int:
    """Kernels while a copy of a piece is under way, in the bodies of loops."""
    found = 0
    for body in re.findall(r"\n%[^\n]*\{\n(.*?)\n\}", text, re.DOTALL):
        under_way = 0
        for line in body.splitlines():
            if re.search(r"slice-start\S* = [^\n]*S\(5\)", line):
                under_way += 1
            elif re.search(r"slice-done\S* = ", line):
                under_way -= 1
            elif under_way and " = " in line and "fusion(" in line:
                found += 1
    return found
