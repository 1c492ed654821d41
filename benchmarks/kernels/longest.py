"""How long a sequence can be trained on one H200: by what the compiled step holds.

A GPT of BERT's sizes, one sequence a step, in bf16 with AdamW; of bytes, so that logits
don't decide. Nothing is run: the program of each length is compiled, and what it holds
at its worst moment is held against the device's memory.
"""

import bisect
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import optax

import jaxpar
from jaxpar.compiled.hardware import load_hardware
from jaxpar.compiled.program import read_program
from jaxpar.models import DecoderConfig, decoder_loss, make_decoder
from jaxpar.planner.absent_devices import gpu_devices
from jaxpar.sparse_attention import causal_pattern

SIZES = {"bert-base": (12, 768, 12), "bert-large": (24, 1024, 16)}
"""Layers, width and heads."""
LENGTHS = sorted(half << i for half in (1024, 1536) for i in range(10))
USABLE = 0.92
"""Of the device's memory, beside what the driver and fragments take."""
PATTERN = {"block": 128, "window": 512, "global_tokens": 128}
VARIANTS = {
    "all scores": ("xla", "none"),
    "all scores, remat": ("xla", "full"),
    "cuDNN": ("auto", "none"),
    "cuDNN, remat": ("auto", "full"),
    "fixed": ("fixed", "none"),
    "fixed, remat": ("fixed", "full"),
}
"""Attention, and what is recomputed in the backward pass."""


def peak_bytes(size: str, variant: str, seq_len: int) -> int:
    """What a step holds at its worst moment."""
    layers, width, heads = SIZES[size]
    attention, remat = VARIANTS[variant]
    pattern = None
    if attention not in ("xla", "auto"):
        pattern = causal_pattern(attention, num_heads=heads, **PATTERN)
    config = DecoderConfig(
        vocab_size=256,
        seq_len=seq_len,
        num_layers=layers,
        num_heads=heads,
        width=width,
        positions="rotary",
        attention=pattern or attention,
        remat=remat,
    )
    mesh = jaxpar.make_mesh(jaxpar.MeshShape(), gpu_devices("h200", 1, 1))
    engine = jaxpar.initialize(
        model=make_decoder(config),
        loss_fn=decoder_loss,
        optimizer=optax.adamw(1e-4),
        sample_batch={"tokens": jax.ShapeDtypeStruct((1, seq_len + 1), jnp.int32)},
        mesh=mesh,
        zero=0,
        precision="bf16",
    )
    return read_program(engine.lower().compile(), mesh).memory.peak


def longest(size: str, variant: str) -> dict[str, float]:
    """The longest of `LENGTHS` that fits, found by halves."""
    room = USABLE * load_hardware("h200").memory_bytes
    held: dict[int, int] = {}

    def is_too_long(length: int) -> bool:
        held[length] = peak_bytes(size, variant, length)
        return held[length] > room

    number = bisect.bisect_left(LENGTHS, True, key=is_too_long)
    if number == 0:
        return {"tokens": 0, "peak_gb": 0.0}
    tokens = LENGTHS[number - 1]
    return {"tokens": tokens, "peak_gb": held[tokens] / 1e9}


def compiled() -> Iterator[tuple[str, dict[str, float]]]:
    """Of every size and variant, and times as many tokens as with all scores."""
    for size in SIZES:
        dense = 0
        for variant in VARIANTS:
            found = longest(size, variant)
            dense = dense or int(found["tokens"])
            times = {"of_all_scores": found["tokens"] / dense}
            yield f"{size}, {variant}", {**found, **times}
