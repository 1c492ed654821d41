"""A run whose state is on disk, which a test kills: FOLDER as argument.

With STEPS too, the same in memory for so many, whose state is written to a file there.
"""

import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

import jaxpar
from tests.equivalence.perceptron import batches, make_engine

SECONDS = 0.2
"""A run is killed within so many after it has begun: a few steps."""

ADAM = optax.adamw(1e-2)


def on_disk(folder: Path) -> jaxpar.Engine:
    """The engine of the run that is killed."""
    offload = jaxpar.Offload(optimizer="disk", path=str(folder), piece_mb=0.0002)
    return make_engine(ADAM, 4, 2, 3, offload=offload)


def batch(step: int) -> dict:
    """Of a step, from 0."""
    return batches()[step % len(batches())]


def leaves_of(engine: jaxpar.Engine) -> list[np.ndarray]:
    """What two runs are compared by."""
    state = engine.state
    return [np.asarray(x) for x in jax.tree.leaves((state.params, state.opt_state))]


def run_in_memory(folder: Path, steps: int) -> None:
    """Take so many steps, and write the state."""
    offload = jaxpar.Offload(update="host", piece_mb=0.0002)
    engine: Any = make_engine(ADAM, 4, 2, 3, offload=offload)
    for step in range(steps):
        engine.step(batch(step))
    np.savez(folder / "right.npz", *leaves_of(engine))


def main() -> None:
    """Go on, and say each step once it has returned."""
    folder = Path(sys.argv[1])
    if len(sys.argv) > 2:
        run_in_memory(folder, int(sys.argv[2]))
        return
    engine = on_disk(folder)
    step = engine.resume()
    print("resumed", step, flush=True)
    while True:
        engine.step(batch(step))
        step += 1
        print("step", step, flush=True)


if __name__ == "__main__":
    main()
