"""What does comparing replicas cost? The mark: 1 % of the steps, at every 100th.

A GPT of 4 layers on eight CPU devices, ZeRO 0: every array is replicated, and all of
the state is hashed on every device. Medians, step and probe taking turns.

    python benchmarks/probe_cost.py
"""

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import numpy as np
import optax
from rich.console import Console

import jaxpar
from benchmarks.record import write_result
from jaxpar.models import decoder_config, decoder_loss, make_decoder
from jaxpar.tree import num_elements

DEVICES, ROWS, TURNS, EVERY = 8, 16, 15, 100


def seconds(run: Callable[[], Any]) -> float:
    """Of one call, to its end on the devices."""
    began = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - began


def made(zero: int) -> tuple[jaxpar.Engine, dict[str, np.ndarray]]:
    """An engine of a small GPT, and a batch."""
    jax.config.update("jax_num_cpu_devices", DEVICES)
    model = decoder_config("tiny")
    shape = (ROWS, model.seq_len + 1)
    engine = jaxpar.initialize(
        model=make_decoder(model),
        loss_fn=decoder_loss,
        optimizer=optax.adamw(1e-3),
        sample_batch={"tokens": jax.ShapeDtypeStruct(shape, np.int32)},
        mesh=jaxpar.MeshShape(data=DEVICES),
        zero=zero,
    )
    rng = np.random.default_rng(0)
    batch = {"tokens": rng.integers(0, model.vocab_size, shape, dtype=np.int32)}
    return engine, batch


def main() -> None:
    """Measure, print, write."""
    engine, batch = made(zero=0)
    steps, probes = [], []
    for turn in range(TURNS + 1):
        taken = seconds(lambda: engine.step(batch))
        compared = seconds(engine.probe)
        if turn:  # The first compiles.
            steps.append(taken)
            probes.append(compared)
    step, probe = statistics.median(steps), statistics.median(probes)
    share = probe / (EVERY * step)
    console = Console(highlight=False)
    console.print(f"step {step * 1e3:.1f} ms, probe {probe * 1e3:.1f} ms")
    console.print(f"every {EVERY} steps: {share:.3%} of them (mark 1 %)")
    measured = {
        "step_seconds": step,
        "probe_seconds": probe,
        "share_at_100": share,
        "num_params": num_elements(engine.state.params),
    }
    console.print(write_result("probe_cost", measured))


if __name__ == "__main__":
    main()
