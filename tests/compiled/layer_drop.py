"""What is compiled for eight H200s: a GPT's step that leaves layers out."""

import dataclasses
from collections.abc import Iterator

import jax
import optax
from jax.extend import core

import jaxpar
from jaxpar.jaxprs.evaluate import inner_jaxprs
from jaxpar.models import DecoderConfig, LayerDrop, decoder_loss, make_decoder
from jaxpar.planner.targets import parse_target


def gathers_of_layers() -> tuple[bool, ...]:
    """Of each gather in a loop, whether it is in a branch; the step is compiled too."""
    config = DecoderConfig(
        vocab_size=512, seq_len=128, num_layers=4, num_heads=4, width=256, dropout=0.1
    )
    drop = LayerDrop(theta=0.5, gamma=0.1)
    tokens = jax.ShapeDtypeStruct((16, config.seq_len + 1), "int32")
    engine = jaxpar.initialize(
        model=dataclasses.replace(make_decoder(config), layer_drop=drop),
        loss_fn=decoder_loss,
        optimizer=optax.adamw(1e-3),
        sample_batch={"tokens": tokens},
        devices=parse_target("h200:1x8").devices(),
        zero=3,
        precision="bf16",
    )
    engine.verify()
    traces = engine.traces().values()
    return tuple(flag for traced in traces for flag in _gathers(traced.jaxpr.jaxpr))


def _gathers(
    jaxpr: core.Jaxpr, *, in_loop: bool = False, in_branch: bool = False
) -> Iterator[bool]:
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if name == "all_gather" and in_loop:
            yield in_branch
        for inner in inner_jaxprs(eqn).values():
            how = {"in_loop": in_loop or name == "scan"}
            how["in_branch"] = in_branch or name == "cond"
            yield from _gathers(inner.jaxpr, **how)
