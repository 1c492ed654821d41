"""What does it cost to replay a step on shifted devices, and to compare?

A GPT of 4 layers on eight CPU devices, ZeRO 3. Medians, plain and replayed steps taking
turns; the first turn, which compiles, is reported alone.

    python benchmarks/replay_cost.py
"""

import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rich.console import Console

from benchmarks.probe_cost import EVERY, TURNS, made, seconds
from benchmarks.record import write_result
from jaxpar.tree import num_elements


def main() -> None:
    """Measure, print, write."""
    engine, batch = made(zero=3)
    replays = engine.replays()

    def replayed() -> Any:
        replays.begin(batch)
        replays.check(engine.step(batch))

    first = seconds(lambda: engine.step(batch)), seconds(replayed)
    turns = [
        (seconds(lambda: engine.step(batch)), seconds(replayed)) for _ in range(TURNS)
    ]
    step, both = (statistics.median(own) for own in zip(*turns, strict=True))
    times, share = both / step, (both - step) / (EVERY * step)
    console = Console(highlight=False)
    console.print(f"first step {first[0]:.1f} s, first replayed one {first[1]:.1f} s")
    console.print(
        f"step {step * 1e3:.1f} ms, replayed {both * 1e3:.1f} ms: {times:.2f}"
    )
    console.print(f"every {EVERY} steps: {share:.2%} of them")
    measured = {
        "step_seconds": step,
        "replayed_step_seconds": both,
        "times": times,
        "share_at_100": share,
        "first_step_seconds": first[0],
        "first_replayed_step_seconds": first[1],
        "num_params": num_elements(engine.state.params),
    }
    console.print(write_result("replay_cost", measured))


if __name__ == "__main__":
    main()
