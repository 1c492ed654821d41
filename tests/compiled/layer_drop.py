"""What is compiled for eight H200s: a GPT's step that leaves layers out."""

import dataclasses

import jax
import optax

import jaxpar
from jaxpar.compiled.hlo import Computation, parse
from jaxpar.jaxprs.branches import turns_in
from jaxpar.models import DecoderConfig, LayerDrop, decoder_loss, make_decoder
from jaxpar.planner.targets import parse_target

LAYERS, THETA = 4, 0.5
SHARE = 1 - (LAYERS + 1) / (2 * LAYERS) * (1 - THETA)
"""Of the layers that a step runs, in the end."""


@dataclasses.dataclass(frozen=True)
class Loop:
    """A loop over layers of the compiled step.

    Attributes:
      turns: how often it runs, as the program says.
      gathers: collectives that gather a layer, in a turn.
      beside: matmuls that stand between the start of a gather and its end.
      branches: conditionals in it.
    """

    turns: float
    gathers: int
    beside: int
    branches: int


@dataclasses.dataclass(frozen=True)
class Found:
    """What was compiled.

    Attributes:
      loops: over layers, in the program's order.
      bytes_gathered: of a step, on average.
      whole_bytes_gathered: of the step of a model that leaves no layer out.
      notes: of `explain`.
    """

    loops: tuple[Loop, ...]
    bytes_gathered: int
    whole_bytes_gathered: int
    notes: tuple[str, ...]


def compile_step() -> Found:
    """Compile the step at ZeRO 3, with layers left out and without."""
    dropping = make_engine(LayerDrop(theta=THETA, gamma=0.1))
    dropping.verify()
    module = parse(dropping.lower().compile().as_text() or "")
    loops = [
        _loop(turns, module.computations[each.attribute("body").lstrip("%")])
        for computation in module.computations.values()
        for each in computation.instructions.values()
        if each.opcode == "while" and (turns := turns_in(each.op_name)) is not None
    ]
    explained = dropping.explain()
    whole = make_engine(None).explain()
    gathered, right = (
        sum(row.bytes for row in own.program.collectives if row.kind == "all-gather")
        for own in (explained, whole)
    )
    return Found(tuple(loops), gathered, right, explained.notes)


def make_engine(drop: LayerDrop | None) -> jaxpar.Engine:
    config = DecoderConfig(
        vocab_size=512,
        seq_len=128,
        num_layers=LAYERS,
        num_heads=4,
        width=256,
        dropout=0.1,
    )
    tokens = jax.ShapeDtypeStruct((16, config.seq_len + 1), "int32")
    return jaxpar.initialize(
        model=dataclasses.replace(make_decoder(config), layer_drop=drop),
        loss_fn=decoder_loss,
        optimizer=optax.adamw(1e-3),
        sample_batch={"tokens": tokens},
        devices=parse_target("h200:1x8").devices(),
        zero=3,
        precision="bf16",
    )


def _loop(turns: float, body: Computation) -> Loop:
    order = list(body.instructions.values())
    opcodes = [own.opcode for own in order]
    starts = [n for n, x in enumerate(opcodes) if x == "all-gather-start"]
    ends = [n for n, x in enumerate(opcodes) if x == "all-gather-done"]
    beside = [
        own.name
        for start, end in zip(starts, ends, strict=True)
        for own in order[start:end]
        if "gemm" in own.name
    ]
    return Loop(turns, len(starts), len(beside), opcodes.count("conditional"))
