"""What do random numbers that do not depend on the mesh cost? The mark: 3 % of a step.

A GPT of 4 layers with dropout on eight CPU devices. One engine draws the numbers that
one device would draw for each shard's rows; the other draws on every shard what its
shapes ask for, as a plain `shard_map` does. Medians, taking turns; and the instructions
that XLA counts in each compiled step.

    python benchmarks/dropout_cost.py
"""

import statistics
import sys
import time
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import dataclasses

import jax
import numpy as np
import optax
from rich.console import Console

import jaxpar
from benchmarks.record import write_result
from jaxpar.models import decoder_config, decoder_loss, make_decoder
from jaxpar.step.row_draws import AsTraced

DEVICES, ROWS, TURNS = 8, 16, 31
MODEL = dataclasses.replace(decoder_config("tiny"), dropout=0.1)
SHAPE = (ROWS, MODEL.seq_len + 1)


def make_engine() -> jaxpar.Engine:
    """An engine that trains the GPT."""
    return jaxpar.initialize(
        model=make_decoder(MODEL),
        loss_fn=decoder_loss,
        optimizer=optax.adamw(1e-3),
        sample_batch={"tokens": jax.ShapeDtypeStruct(SHAPE, np.int32)},
        mesh=jaxpar.MeshShape(data=DEVICES),
        check_loss=False,
    )


def main() -> None:
    """Measure, print, write."""
    jax.config.update("jax_num_cpu_devices", DEVICES)
    with mock.patch("jaxpar.engine.make_step.OwnRows", return_value=AsTraced()):
        engines = {"as_traced": make_engine()}
    engines["own_rows"] = make_engine()
    rng = np.random.default_rng(0)
    batch = {"tokens": rng.integers(0, MODEL.vocab_size, SHAPE, dtype=np.int32)}
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    for turn in range(TURNS + 1):
        for name in sorted(engines, reverse=bool(turn % 2)):
            began = time.perf_counter()
            jax.block_until_ready(engines[name].step(batch))
            if turn:  # The first compiles.
                seconds[name].append(time.perf_counter() - began)
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    flops = {
        name: (engine.lower().compile().cost_analysis() or {})["flops"]
        for name, engine in engines.items()
    }
    cost = medians["own_rows"] / medians["as_traced"] - 1
    more = flops["own_rows"] / flops["as_traced"] - 1
    console = Console(highlight=False)
    for name, median in medians.items():
        console.print(f"{name}: {median * 1e3:.1f} ms, {flops[name]:.4g} operations")
    console.print(
        f"own rows cost {cost:+.1%} of a step (mark 3 %), {more:+.2%} of work"
    )
    measured = {
        "step_seconds": medians,
        "operations": flops,
        "cost": cost,
        "more_operations": more,
    }
    console.print(write_result("dropout_cost", measured))


if __name__ == "__main__":
    main()
