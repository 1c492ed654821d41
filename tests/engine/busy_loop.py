"""Steps, evaluations, probes, and saves to disk and memory, in any order.

Run as `python tests/engine/busy_loop.py ZERO DEVICES SEED`: no number is read before
the end, and never are more programs in flight than the engine's bound.
"""

import collections
import random
import sys
import tempfile
from pathlib import Path

from jaxpar.checkpoint import MemoryTier
from jaxpar.engine.run_ahead import AHEAD
from tests.engine.endless_loop import make

CALLS = {"step": 8, "evaluate": 6, "probe": 3, "save": 1, "keep": 1}
"""And how often each is made, of the sum."""
ROUNDS = 300


def main(zero: int, devices: int, seed: int, folder: Path) -> None:
    engine, batch = make(zero, devices)
    tier = MemoryTier(folder, root=folder)
    calls = {
        "step": lambda: engine.step(batch),
        "evaluate": lambda: engine.evaluate(batch),
        "probe": engine.probe,
        "save": lambda: engine.save(folder / "checkpoints"),
        "keep": lambda: engine.save(tier),
    }
    rng, made = random.Random(seed), collections.Counter()
    for _ in range(ROUNDS):
        (what,) = rng.choices(list(CALLS), list(CALLS.values()))
        calls[what]()
        made[what] += 1
        assert len(engine._ahead._waiting) <= AHEAD
    loss = float(engine.evaluate(batch)["loss"])
    engine.wait()
    tier.close(delete=True)
    assert engine.steps == made["step"]
    assert min(made[name] for name in CALLS) > 5
    print(f"{sum(made.values())} calls, loss {loss:.3f}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        main(*map(int, sys.argv[1:]), Path(place))
