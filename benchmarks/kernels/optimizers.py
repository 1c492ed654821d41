"""Optimizers: a step of optax's, leaf by leaf, beside one of a kernel on a bucket.

Gradients are in bf16, parameters and moments in fp32 where they are not in 8 bits, and
a step makes the copy in bf16 that the next one computes with.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxpar
from benchmarks.kernels.timing import compile_for_h200, seconds_of_steps
from jaxpar.compiled.hlo import parse
from jaxpar.models import decoder_config, decoder_loss, make_decoder
from jaxpar.optim import fused_adamw
from jaxpar.planner.absent_devices import gpu_devices
from jaxpar.planner.work import memory_traffic
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
ALL_MODELS = (*MODELS, "tiny")
"""With one that takes a moment on a CPU."""
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
      beside: names of contestants that its time is compared with.
    """

    name: str
    run: Callable[[Any, Any], Any]
    init: Callable[[], Any]
    grads: Callable[[], Any]
    least_bytes: int
    beside: tuple[str, ...] = ()


def shapes_of(model: str) -> list[tuple[int, ...]]:
    """Of a GPT's leaves, layer by layer."""
    tokens = jax.ShapeDtypeStruct((1, 8), jnp.int32)
    gpt = make_decoder(decoder_config(model))
    params = jax.eval_shape(lambda: gpt.init(0, tokens)).params
    blocks = [leaf.shape for leaf in jax.tree.leaves(params.pop("blocks"))]
    ends = [leaf.shape for leaf in jax.tree.leaves(params)]
    return ends + [shape[1:] for shape in blocks for _ in range(shape[0])]


def steps_of(model: str, implementation: Any = "mosaic") -> Iterator[Step]:
    """The contestants; each behind those that it is compared with.

    Args:
      model: whose parameters.
      implementation: of the fused optimizers: "mosaic", or "reference" on a CPU.
    """
    shapes = shapes_of(model)
    of_buckets = functools.partial(
        of_bucket, shapes=shapes, implementation=implementation
    )
    for clipped in (" clipped", ""):
        adamw = optax.adamw(RATE, weight_decay=DECAY)
        clip = bool(clipped)
        beside = f"optax adamw{clipped}", f"torch fused adamw{clipped}"
        yield of_optax(beside[0], adamw, shapes, 28, clip=clip)
        fused = functools.partial(of_buckets, rule=AdamW(), clip=clip)
        yield fused(f"fused adamw{clipped}", least_bytes=28, beside=beside)
        of_fp32 = (*beside, f"fused adamw{clipped}")
        name = f"fused adamw 8 bits{clipped}"
        yield fused(name, least_bytes=16, bits=8, beside=of_fp32)
    fused = functools.partial(of_buckets, clip=True)
    beside = "optax adamw clipped", "torch fused adamw clipped"
    packed = "fused adamw clipped, packed"
    yield fused(packed, rule=AdamW(), least_bytes=32, packs=True, beside=beside)
    lamb, lion = optax.lamb(RATE, weight_decay=DECAY), optax.lion(RATE)
    for rule, optimizer, name, least_bytes in (
        (AdamW(trust_ratio=True), lamb, "lamb clipped", 40),
        (Lion(), lion, "lion clipped", 20),
    ):
        beside = (f"optax {name}",)
        yield of_optax(beside[0], optimizer, shapes, least_bytes, clip=True)
        name = f"fused {name}"
        yield fused(name, rule=rule, least_bytes=least_bytes, beside=beside)


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
    *,
    rule: Rule,
    shapes: list[tuple[int, ...]],
    implementation: Any,
    clip: bool,
    least_bytes: int,
    bits: int = 32,
    packs: bool = False,
    beside: tuple[str, ...] = (),
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
        options["implementation"] = implementation
        new = fused_update(rule, params, grads, moments, numbers, **options)
        return new.params, new.moments, new.copies, count + 1

    flat = [(num_elements,)]

    def init() -> Any:
        moments = init_moments(rule, num_elements, bits=bits)
        (params,), (copies,) = drawn(flat, jnp.float32), drawn(flat, jnp.bfloat16)
        return params, moments, copies, jnp.int32(1)

    def grads() -> Any:
        if packs:
            return drawn(shapes, jnp.bfloat16)
        return drawn(flat, jnp.bfloat16)[0]

    return Step(name, run, init, grads, least_bytes, beside)


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


def measure(
    model: str,
    rounds: int,
    torch: Mapping[str, Mapping[str, float]],
    implementation: Any = "mosaic",
) -> Iterator[tuple[str, dict[str, float]]]:
    """Each contestant's time, the bytes a second that it is worth, and ratios.

    Args:
      model: whose parameters.
      rounds: timed rounds of each.
      torch: what torch measured, by name.
      implementation: of the fused optimizers: "mosaic", or "reference" on a CPU.

    Yields:
      Names and numbers; ``of_...`` is the other's time over the contestant's own.
    """
    elements = num_elements_of(model)
    times = {}
    for name, found in torch.items():
        times[name] = found["ms"] / 1e3
        yield name, numbers_of(times[name], 28 * elements)
    for step in steps_of(model, implementation):
        state, grads = jax.jit(step.init)(), jax.jit(step.grads)()
        times[step.name] = seconds_of_steps(step.run, state, grads, rounds)
        found = numbers_of(times[step.name], step.least_bytes * elements)
        for other in step.beside:
            if other in times:
                word = other.split()[0]
                column = "of_fp32" if word == "fused" else f"of_{word}"
                found[column] = times[other] / times[step.name]
        yield step.name, found


def numbers_of(taken: float, num_bytes: int) -> dict[str, float]:
    """What is told of a contestant, of the seconds that it took."""
    return {"ms": 1e3 * taken, "gb_per_second": num_bytes / taken / 1e9}


def compiled(model: str) -> Iterator[tuple[str, dict[str, float]]]:
    """What each contestant compiles to for an H200 that is not here."""
    elements = num_elements_of(model)
    for step in steps_of(model):
        args = jax.eval_shape(step.init), jax.eval_shape(step.grads)
        found = compile_for_h200(step.run, args, donated=(0,))
        moved = found.pop("moved_gb") * 1e9 / elements
        least = {"least_bytes_a_parameter": step.least_bytes}
        yield step.name, {**found, "bytes_a_parameter": moved, **least}
    yield from in_training_steps(model)


def in_training_steps(model: str) -> Iterator[tuple[str, dict[str, float]]]:
    """What a whole training step moves on each H200, by optimizer: of 128 tokens."""
    optimizers = {
        "optax adamw": optax.adamw(RATE, weight_decay=DECAY),
        "fused adamw": fused_adamw(RATE, weight_decay=DECAY),
        "fused adamw 8 bits": fused_adamw(RATE, weight_decay=DECAY, bits=8),
    }
    for devices, stage in ((1, 0), (8, 1)):
        for name, optimizer in optimizers.items():
            moved = moved_in_step(model, optimizer, devices, stage)
            row = f"step on {devices} at ZeRO {stage}, {name}"
            yield row, {"bytes_a_parameter": moved / num_elements_of(model)}


def moved_in_step(model: str, optimizer: Any, devices: int, stage: int) -> float:
    """Bytes that a training step reads and writes on each of some H200s."""
    config = decoder_config(model, seq_len=128)
    shape = jaxpar.MeshShape(data=devices)
    engine = jaxpar.initialize(
        model=make_decoder(config),
        loss_fn=decoder_loss,
        optimizer=optimizer,
        sample_batch={"tokens": jax.ShapeDtypeStruct((devices, 129), jnp.int32)},
        mesh=jaxpar.make_mesh(shape, gpu_devices("h200", 1, devices)),
        zero=stage,
        precision="bf16",
        clip_norm=CLIP,
    )
    text = engine.lower().compile().as_text()
    assert text is not None
    traffic = memory_traffic(parse(text))
    return traffic.products + traffic.others


def num_elements_of(model: str) -> int:
    """Of a model's leaves."""
    return sum(int(np.prod(shape)) for shape in shapes_of(model))
