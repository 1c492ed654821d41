"""Optimizers: a step of optax's, leaf by leaf, beside one of a kernel on a bucket.

Gradients are in bf16, parameters and moments in fp32 where they are not in 8 bits, and
a step makes the copy in bf16 that the next one computes with.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from benchmarks.kernels.timing import compile_for_h200, seconds_of_steps
from jaxpar.models import GPT, gpt_config
from kernels_pallas.fused_optimizers import (
    TILE,
    AdamW,
    Leaves,
    Lion,
    Numbers,
    Rule,
    fused_update,
    init_moments,
)

MODELS = ("124m", "1.3b")
RATE, DECAY, CLIP = 1e-3, 0.1, 1.0


@dataclasses.dataclass(frozen=True)
class Step:
    """An optimizer's step.

    Attributes:
      name: of the contestant.
      run: ``(state, grads) -> state``.
      init: makes the state.
      grads: makes the gradients.
      least_bytes: a parameter, that it has to read and write.
    """

    name: str
    run: Callable[[Any, Any], Any]
    init: Callable[[], Any]
    grads: Callable[[], Any]
    least_bytes: int


def shapes_of(model: str) -> list[tuple[int, ...]]:
    """Of a GPT's leaves, layer by layer."""
    config = dataclasses.replace(gpt_config(model), scan_layers=False)
    state = nnx.state(nnx.eval_shape(lambda: GPT(config, rngs=nnx.Rngs(0))), nnx.Param)
    return [leaf.shape for leaf in jax.tree.leaves(state)]


def steps_of(model: str) -> Iterator[Step]:
    """The contestants."""
    shapes = shapes_of(model)
    for clip in (True, False):
        clipped = " clipped" if clip else ""
        adamw = optax.adamw(RATE, weight_decay=DECAY)
        yield of_optax(f"optax adamw{clipped}", adamw, shapes, 28, clip=clip)
        name, rule = f"fused adamw{clipped}", AdamW()
        yield of_bucket(name, rule, shapes, clip=clip, least_bytes=28)
    fused = functools.partial(of_bucket, shapes=shapes, clip=True)
    yield fused("fused adamw clipped, packed", AdamW(), least_bytes=32, packs=True)
    yield fused("fused adamw 8 bits clipped", AdamW(), least_bytes=16, bits=8)
    lamb, lion = optax.lamb(RATE, weight_decay=DECAY), optax.lion(RATE)
    yield of_optax("optax lamb clipped", lamb, shapes, 40, clip=True)
    yield fused("fused lamb clipped", AdamW(trust_ratio=True), least_bytes=40)
    yield of_optax("optax lion clipped", lion, shapes, 20, clip=True)
    yield fused("fused lion clipped", Lion(), least_bytes=20)


def of_optax(
    name: str,
    optimizer: optax.GradientTransformation,
    shapes: list[tuple[int, ...]],
    least_bytes: int,
    *,
    clip: bool,
) -> Step:
    """An optax transformation, with the copy that XLA fuses into it."""

    def run(state: Any, grads: Any) -> Any:
        params, opt_state, _ = state
        grads = [grad.astype(jnp.float32) for grad in grads]
        factor = clip_factor(grads, clip=clip)
        grads = [grad * factor for grad in grads]
        updates, opt_state = optimizer.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        copies = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
        return params, opt_state, copies

    def init() -> Any:
        params = drawn(shapes, jnp.float32)
        return params, optimizer.init(params), drawn(shapes, jnp.bfloat16)

    return Step(name, run, init, lambda: drawn(shapes, jnp.bfloat16), least_bytes)


def of_bucket(
    name: str,
    rule: Rule,
    shapes: list[tuple[int, ...]],
    *,
    clip: bool,
    least_bytes: int,
    bits: int = 32,
    packs: bool = False,
) -> Step:
    """A kernel on a bucket; `packs`: gradients come as leaves, and are packed first."""
    tiles = [-(-int(np.prod(shape)) // TILE) for shape in shapes]
    num_elements = TILE * sum(tiles)
    leaves = Leaves(np.repeat(np.arange(len(tiles)), tiles), len(tiles))

    def run(state: Any, grads: Any) -> Any:
        params, moments, copies, count = state
        if packs:
            grads = packed(grads, tiles)
        factor = clip_factor(grads, clip=clip)
        numbers = Numbers(RATE, count, factor)
        options = {"decays": DECAY, "copies": copies, "leaves": leaves}
        options["implementation"] = "mosaic"
        new = fused_update(rule, params, grads, moments, numbers, **options)
        return new.params, new.moments, new.copies, count + 1

    flat = [(num_elements,)]

    def init() -> Any:
        moments = init_moments(rule, num_elements, bits=bits)
        moments = jax.tree.map(jnp.copy, moments)  # Each is donated on its own.
        (params,), (copies,) = drawn(flat, jnp.float32), drawn(flat, jnp.bfloat16)
        return params, moments, copies, jnp.int32(1)

    def grads() -> Any:
        if packs:
            return drawn(shapes, jnp.bfloat16)
        return drawn(flat, jnp.bfloat16)[0]

    return Step(name, run, init, grads, least_bytes)


def packed(grads: list[jax.Array], tiles: list[int]) -> jax.Array:
    """Lay gradients one after the other, each in whole tiles."""
    filled = [
        jnp.pad(grad.reshape(-1), (0, num * TILE - grad.size))
        for grad, num in zip(grads, tiles, strict=True)
    ]
    return jnp.concatenate(filled)


def clip_factor(grads: Any, *, clip: bool) -> jax.Array | float:
    """What clips gradients by their global norm."""
    if not clip:
        return 1.0
    norm = optax.tree.norm(jax.tree.map(lambda x: x.astype(jnp.float32), grads))
    return jnp.minimum(1.0, CLIP / norm)


def drawn(shapes: list[tuple[int, ...]], dtype: Any) -> list[jax.Array]:
    """Random arrays."""
    keys = jax.random.split(jax.random.key(0), len(shapes))
    pairs = zip(keys, shapes, strict=True)
    return [jax.random.normal(key, shape, dtype) for key, shape in pairs]


def measure(model: str, rounds: int) -> Iterator[tuple[str, dict[str, float]]]:
    """Each contestant's time, and the bytes a second that it is worth."""
    elements = num_elements_of(model)
    for step in steps_of(model):
        state, grads = jax.jit(step.init)(), jax.jit(step.grads)()
        taken = seconds_of_steps(step.run, state, grads, rounds)
        rate = step.least_bytes * elements / taken / 1e9
        yield step.name, {"ms": 1e3 * taken, "gb_per_second": rate}


def compiled(model: str) -> Iterator[tuple[str, dict[str, float]]]:
    """What each contestant compiles to for an H200 that is not here."""
    elements = num_elements_of(model)
    for step in steps_of(model):
        args = jax.eval_shape(step.init), jax.eval_shape(step.grads)
        found = compile_for_h200(step.run, args, donated=(0,))
        moved = found.pop("moved_gb") * 1e9 / elements
        least = {"least_bytes_a_parameter": step.least_bytes}
        yield step.name, {**found, "bytes_a_parameter": moved, **least}


def num_elements_of(model: str) -> int:
    """Of a model's leaves."""
    return sum(int(np.prod(shape)) for shape in shapes_of(model))
