"""What does the engine cost: its step against the same step written by hand.

Three parts. The *step* of a small GPT on one and on eight CPU devices, engine and hand-
written jit alternating, medians compared; both must give the same loss. The *update* of
a GPT of 3.2 million parameters and 16 tokens, which computes little else: the engine,
which skips steps that are not finite, against steps by hand that compute no norm and
skip nothing, or choose the old state behind the update. The *dispatch* of a model of
1,000 parameters: the engine against a flat `jax.jit` and `nnx.jit`.

    python benchmarks/step_overhead.py
    python benchmarks/step_overhead.py --only update    # results/step_overhead_update
"""

import dataclasses
import functools
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jaxpar
from benchmarks.record import write_result
from jaxpar.cli.recipe_flags import parse
from jaxpar.models import DecoderConfig, decoder_loss, make_decoder

CLIP = 1.0


@dataclasses.dataclass(frozen=True)
class Config:
    """What to measure, and how often."""

    rounds: int = 40
    """Alternations of engine and hand-written step; the median counts."""
    leaves: int = 1000
    """Parameters of the dispatch model."""
    only: Literal["", "step", "update", "dispatch"] = ""
    """One part; empty: all."""


def interleaved(
    rounds: int, calls: int, *, until_done: bool, **steps: Callable[[], Any]
) -> dict[str, float]:
    """Median seconds of each callable: until done, or until it returns.

    They alternate, `calls` of each at a time; the first of those, which finds the
    caches filled by another program, does not count where there are more.
    """
    times: dict[str, list[float]] = {name: [] for name in steps}
    for index in range(rounds + 3):
        for name, step in steps.items():
            for call in range(calls):
                start = time.perf_counter()
                out = step()
                dispatched = time.perf_counter()
                jax.block_until_ready(out)
                stop = time.perf_counter() if until_done else dispatched
                if index >= 3 and call >= min(calls - 1, 1):
                    times[name].append(stop - start)
    return {name: statistics.median(values) for name, values in times.items()}


def measure_step(num_devices: int, zero: int, rounds: int) -> dict[str, float]:
    """Time the GPT's step on some devices, by engine and by hand."""
    config = DecoderConfig(num_layers=4, num_heads=4, width=128, seq_len=128)
    mesh = jaxpar.make_mesh(jaxpar.MeshShape(), jax.devices()[:num_devices])
    rows = np.random.default_rng(0).integers(0, 256, (16, 129), dtype=np.int32)
    batch = {"tokens": rows}
    optimizer = optax.adamw(1e-3)
    engine = jaxpar.initialize(
        model=make_decoder(config),
        loss_fn=decoder_loss,
        optimizer=optimizer,
        sample_batch=batch,
        mesh=mesh,
        zero=zero,
        clip_norm=CLIP,
    )
    by_hand = HandWritten(engine, optimizer)
    losses = [(float(engine.step(batch)["loss"]), float(by_hand.step(batch)))] + [
        (float(engine.step(batch)["loss"]), float(by_hand.step(batch)))
        for _ in range(4)
    ]
    np.testing.assert_allclose(*zip(*losses, strict=True), rtol=1e-5)
    seconds = interleaved(
        rounds,
        1,
        until_done=True,
        engine=lambda: engine.step(batch),
        by_hand=lambda: by_hand.step(batch),
    )
    return {
        "engine_ms": seconds["engine"] * 1e3,
        "by_hand_ms": seconds["by_hand"] * 1e3,
        "by_hand_over_engine": seconds["by_hand"] / seconds["engine"],
        "last_loss": losses[-1][0],
    }


def measure_update(rounds: int) -> dict[str, float]:
    """Time a step of many parameters and few tokens, without clipping."""
    config = DecoderConfig(num_layers=4, num_heads=4, width=256, seq_len=16)
    mesh = jaxpar.make_mesh(jaxpar.MeshShape(), jax.devices()[:1])
    rows = np.random.default_rng(0).integers(0, 256, (1, 17), dtype=np.int32)
    batch, optimizer = {"tokens": rows}, optax.adamw(1e-3)
    engine = jaxpar.initialize(
        model=make_decoder(config),
        loss_fn=decoder_loss,
        optimizer=optimizer,
        sample_batch=batch,
        mesh=mesh,
    )
    unchecked = HandWritten(engine, optimizer, clips=False)
    chosen_late = HandWritten(engine, optimizer, clips=False, skips=True)
    seconds = interleaved(
        rounds,
        1,
        until_done=True,
        engine=lambda: engine.step(batch),
        unchecked=lambda: unchecked.step(batch),
        chosen_late=lambda: chosen_late.step(batch),
    )
    return {f"{name}_ms": value * 1e3 for name, value in seconds.items()} | {
        "engine_over_unchecked": seconds["engine"] / seconds["unchecked"],
        "chosen_late_over_unchecked": seconds["chosen_late"] / seconds["unchecked"],
    }


class HandWritten:
    """The same math as one jit over global arrays, at the engine's own shardings.

    Args:
      engine: whose state it begins with.
      optimizer: the engine's.
      clips: whether it clips by the global norm.
      skips: whether it keeps the old state where the norm is not finite.
    """

    def __init__(
        self,
        engine: jaxpar.Engine,
        optimizer: optax.GradientTransformation,
        *,
        clips: bool = True,
        skips: bool = False,
    ):
        gpt = engine.model()
        state = jax.tree.map(jnp.copy, (engine.state.params, engine.state.opt_state))
        shardings = jax.tree.map(lambda x: x.sharding, state)
        rows = NamedSharding(engine.mesh, P("data"))

        def loss_of(params: Any, batch: Any) -> jax.Array:
            loss = decoder_loss(gpt.with_params(params), batch)
            return loss.total / loss.weight

        @functools.partial(
            jax.jit,
            in_shardings=(shardings, rows),
            out_shardings=(shardings, NamedSharding(engine.mesh, P())),
            donate_argnums=0,
        )
        def step(state: tuple, batch: Any) -> tuple:
            params, opt_state = state
            loss, grads = jax.value_and_grad(loss_of)(params, batch)
            norm = optax.tree.norm(grads)
            if clips:
                grads = jax.tree.map(lambda g: g * jnp.minimum(1.0, CLIP / norm), grads)
            updates, opt_state = optimizer.update(grads, opt_state, params)
            after = optax.apply_updates(params, updates), opt_state
            if skips:
                after = optax.tree.where(jnp.isfinite(norm), after, state)
            return after, loss

        self._step, self._state, self._rows = step, state, rows

    def step(self, batch: Any) -> jax.Array:
        """Take a step; the loss."""
        placed = jax.device_put(batch, self._rows)
        self._state, loss = self._step(self._state, placed)
        return loss


class ManyLeaves(nnx.Module):
    """A model that is nothing but parameters."""

    def __init__(self, num_leaves: int):
        self.leaves = nnx.List([nnx.Param(jnp.ones(2)) for _ in range(num_leaves)])

    def __call__(self, x: jax.Array) -> jax.Array:
        """Sum them all."""
        return x.sum() * sum(leaf[...].sum() for leaf in self.leaves)


def measure_dispatch(num_leaves: int, rounds: int) -> dict[str, float]:
    """Time the call of one step of the same math, on one device, until it returns."""
    batch = {"x": np.ones((1, 1), np.float32)}
    mesh = jaxpar.make_mesh(jaxpar.MeshShape(), jax.devices()[:1])
    engine = jaxpar.initialize(
        model=lambda rngs: ManyLeaves(num_leaves),
        loss_fn=lambda model, batch: model(batch["x"]),
        optimizer=optax.sgd(1e-6),
        sample_batch=batch,
        mesh=mesh,
    )
    leaves = [jnp.ones(2) for _ in range(num_leaves)]
    model = ManyLeaves(num_leaves)

    def updated(params: Any, grads: Any) -> Any:
        norm = optax.tree.norm(grads)
        return jax.tree.map(
            lambda p, g: jnp.where(jnp.isfinite(norm), p - 1e-6 * g, p), params, grads
        )

    @functools.partial(jax.jit, donate_argnums=0)
    def flat(leaves: list, batch: Any) -> tuple[list, jax.Array]:
        def loss_of(leaves: list) -> jax.Array:
            return batch["x"].sum() * sum(leaf.sum() for leaf in leaves)

        loss, grads = jax.value_and_grad(loss_of)(leaves)
        return updated(leaves, grads), loss

    @nnx.jit
    def by_nnx(model: ManyLeaves, batch: Any) -> jax.Array:
        loss, grads = nnx.value_and_grad(lambda model: model(batch["x"]))(model)
        nnx.update(model, updated(nnx.state(model, nnx.Param), grads))
        return loss

    def flat_step() -> jax.Array:
        nonlocal leaves
        placed = jax.device_put(batch, jax.devices()[0])
        leaves, loss = flat(leaves, placed)
        return loss

    seconds = interleaved(
        rounds,
        10,
        until_done=False,
        engine=lambda: engine.step(batch)["loss"],
        flat=flat_step,
        nnx=lambda: by_nnx(model, batch),
    )
    return {f"{name}_ms": value * 1e3 for name, value in seconds.items()} | {
        "engine_over_flat": seconds["engine"] / seconds["flat"],
        "engine_over_nnx": seconds["engine"] / seconds["nnx"],
    }


def main(config: Config) -> None:
    """Measure, print, write results/step_overhead.json, or of one part."""
    jax.config.update("jax_num_cpu_devices", 8)
    console = Console(highlight=False)
    measured: dict[str, dict[str, float]] = {}
    for name, measure in _cases(config).items():
        if config.only and not name.startswith(config.only):
            continue
        measured[name] = measure()
        console.print(name, _rounded(measured[name]))
    file = "_".join(["step_overhead", *([config.only] if config.only else [])])
    console.print("written to", write_result(file, measured).name)


def _cases(config: Config) -> dict[str, Callable[[], dict[str, float]]]:
    cases: dict[str, Callable[[], dict[str, float]]] = {
        f"step_{num}_devices_zero_{zero}": functools.partial(
            measure_step, num, zero, config.rounds
        )
        for num, zero in ((1, 0), (8, 0), (8, 3))
    }
    update = functools.partial(measure_update, config.rounds)
    dispatch = functools.partial(measure_dispatch, config.leaves, config.rounds)
    return {
        **cases,
        "update_of_few_tokens": update,
        f"dispatch_{config.leaves}_leaves": dispatch,
    }


def _rounded(values: dict[str, float]) -> dict[str, float]:
    return {name: float(f"{value:.4g}") for name, value in values.items()}


if __name__ == "__main__":
    main(parse(Config, __doc__))
